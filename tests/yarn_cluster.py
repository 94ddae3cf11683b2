"""A real Hadoop YARN on loopback for tests: one ResourceManager, some NodeManagers, ZooKeeper, all in one folder.

The jars come from the folder that ``DL2D_HADOOP_LIB`` names. Services are stored in the folder, there is no HDFS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import xml.sax.saxutils
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import psutil
from free_ports import free_ports

_DEFAULT_LIB = Path(__file__).parents[2] / "shared" / "hadoop" / "lib"
#: Java 17 closes packages into which Hadoop 3.4 reaches by reflection.
_OPEN_PACKAGES = tuple(
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in ("java.lang", "java.io", "java.net", "java.util", "java.util.concurrent")
)
#: What makes a Java process start with half of the CPU time: one that runs for minutes needs no optimizing compiler.
_SHORT_LIVED = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
#: Java package of YARN's daemons.
PACKAGE = "org.apache.hadoop.yarn.server"
_LOG4J = """log4j.rootLogger=INFO,file
log4j.appender.file=org.apache.log4j.FileAppender
log4j.appender.file.File={file}
log4j.appender.file.layout=org.apache.log4j.PatternLayout
log4j.appender.file.layout.ConversionPattern=%d{{ISO8601}} %p %c{{1}}: %m%n
"""
#: Ports of each NodeManager: containers, localizer, web, collector, AMRMProxy.
_NODE_PORTS = 5
_START_SECONDS, _STOP_SECONDS = 90.0, 15.0


def hadoop_lib() -> Path:
    """Folder of Hadoop's jars."""
    return Path(os.environ.get("DL2D_HADOOP_LIB", _DEFAULT_LIB))


def why_not() -> str:
    """Why no YARN can be started here; "" where one can."""
    if shutil.which("java") is None:
        return "java is not installed: a private YARN needs Java 17"
    if not list(hadoop_lib().glob("hadoop-yarn-server-resourcemanager-*.jar")):
        return f"no Hadoop jars in {hadoop_lib()}: set DL2D_HADOOP_LIB to a folder of them"
    return ""


class YarnCluster:
    """A running YARN; a context manager that stops it and all of its containers, and removes its files.

    Parameters
    ----------
    nodes
        Number of NodeManagers.
    vcores, memory_mib, gpus
        Capacity of each.
    properties, core, scheduler
        More properties of yarn-site.xml, core-site.xml and capacity-scheduler.xml.
    krb5_conf
        Configuration of Kerberos for the ResourceManager, or "".
    fail_over
        Whether there is a second ResourceManager, ``rm2``.
    of_nodes
        More properties of yarn-site.xml of the NodeManagers, one mapping for each.
    """

    def __init__(
        self,
        *,
        nodes: int = 2,
        vcores: int = 8,
        memory_mib: int = 8192,
        gpus: int = 2,
        properties: Mapping[str, str] | None = None,
        core: Mapping[str, str] | None = None,
        scheduler: Mapping[str, str] | None = None,
        krb5_conf: str = "",
        fail_over: bool = False,
        of_nodes: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dl2d-yarn-"))
        self._count = nodes
        self._capacity = {
            "yarn.nodemanager.resource.memory-mb": str(memory_mib),
            "yarn.nodemanager.resource.cpu-vcores": str(vcores),
            "yarn.nodemanager.resource-type.yarn.io/gpu": str(gpus),
        }
        self._more = dict(properties or {})
        self._more_core = dict(core or {})
        self._more_scheduler = dict(scheduler or {})
        self._of_nodes = of_nodes
        self._krb5_conf = krb5_conf
        #: Authenticates the calls of this fixture itself.
        self.auth: httpx2.Auth | None = None
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._masters = ("rm", "rm2") if fail_over else ("rm",)
        ports = free_ports(11 + _NODE_PORTS * nodes)
        self._rm_ports, self._rm2_ports, self._node_ports = ports[:6], ports[6:11], ports[11:]
        #: Web addresses of the ResourceManagers, by name.
        self.addresses = {
            name: f"http://127.0.0.1:{ports[4]}"
            for name, ports in zip(self._masters, (self._rm_ports, self._rm2_ports), strict=False)
        }
        #: User that the tests act as.
        self.user = "dl2d"

    def __enter__(self) -> Self:
        try:
            self._configure()
            self.start("zookeeper")
            for name in self._masters:
                self.start(name)
            for number in range(self._count):
                self.start(f"nm{number}")
            self.wait_for_nodes(self._count)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop NodeManagers first, so that they end their containers; then kill what is left, and remove the folder."""
        nodes = [process for name, process in self.processes.items() if name.startswith("nm")]
        for processes in (nodes, [process for process in self.processes.values() if process not in nodes]):
            _end(processes)
        # A NodeManager with recovery leaves its containers alive.
        for _ in range(50):
            left = self.container_processes()
            for process in left:
                try:
                    process.kill()
                except psutil.Error:
                    pass
            if not left:
                break
            time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def container_processes(self) -> list[psutil.Process]:
        """Living processes whose environment names a folder of this cluster: containers and what they started."""
        mark, own = str(self.folder), {process.pid for process in self.processes.values()}
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid in own or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if any(mark in value for value in process.environ().values()):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def start(self, name: str) -> None:
        """Start a daemon: ``zookeeper``, ``rm``, ``nm0`` ..."""
        main, conf, memory, arguments = {
            "zookeeper": (
                "org.apache.zookeeper.server.ZooKeeperServerMain",
                "conf",
                128,
                (str(self._rm_ports[5]), str(self.folder / "zookeeper")),
            ),
            "rm": (f"{PACKAGE}.resourcemanager.ResourceManager", "conf", 512, ()),
            "rm2": (f"{PACKAGE}.resourcemanager.ResourceManager", "conf2", 512, ()),
        }.get(name, (f"{PACKAGE}.nodemanager.NodeManager", f"{name}/conf", 256, ()))
        folder = self.folder / conf
        environment = {
            **{key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ},
            "HADOOP_CONF_DIR": str(folder),
            "YARN_LOG_DIR": str(self.folder / "logs"),
            "HADOOP_USER_NAME": self.user,
        }
        command = [
            "java", f"-Xmx{memory}m", *_SHORT_LIVED, *_OPEN_PACKAGES,
            f"-Dhadoop.home.dir={self.folder}", "-Dzookeeper.admin.enableServer=false",
            "-Djava.net.preferIPv4Stack=true",
            *([f"-Djava.security.krb5.conf={self._krb5_conf}"] if self._krb5_conf else []),
            f"-Dlog4j.configuration=file:{self.folder}/logs/{name}.properties",
            "-cp", f"{folder}:{hadoop_lib()}/*", main, *arguments,
        ]  # fmt: skip
        (self.folder / "logs" / f"{name}.properties").write_text(
            _LOG4J.format(file=self.folder / "logs" / f"{name}.log")
        )
        with (self.folder / "logs" / f"{name}.out").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def command(self) -> str:
        """Path of a ``yarn`` command of this cluster, as an installation of Hadoop has it."""
        script = self.folder / "yarn"
        client = "org.apache.hadoop.yarn.client.cli.ApplicationCLI"
        script.write_text(
            f"#!/bin/sh\nHADOOP_USER_NAME={self.user} exec java {' '.join((*_SHORT_LIVED, *_OPEN_PACKAGES))} -cp "
            f"'{self.folder}/conf:{hadoop_lib()}/*' {client} \"$@\"\n"
        )
        script.chmod(0o755)
        return str(script)

    @property
    def address(self) -> str:
        """Web address of the first ResourceManager that has not been killed; a standby redirects to the active one."""
        running = [self.addresses[name] for name in self._masters if name in self.processes]
        return running[0] if running else self.addresses["rm"]

    @property
    def node_managers(self) -> list[str]:
        """Names of the NodeManagers."""
        return [f"nm{number}" for number in range(self._count)]

    def port_of(self, name: str) -> str:
        """Port of a NodeManager, which is part of its node's id."""
        return str(self._node_ports[_NODE_PORTS * int(name.removeprefix("nm"))])

    def kill(self, name: str) -> None:
        """Kill a daemon as a crash would."""
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def wait_for_nodes(self, count: int) -> None:
        """Wait until so many nodes run."""
        deadline = time.monotonic() + _START_SECONDS
        said = ""
        while time.monotonic() < deadline:
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            if dead:
                texts = [
                    (self.folder / "logs" / f"{dead[0]}.{kind}").read_text(errors="replace") for kind in ("out", "log")
                ]
                raise AssertionError(f"{dead[0]} ended: {' '.join(text[-1500:] for text in texts)}")
            try:
                answer = httpx2.get(
                    f"{self.address}/ws/v1/cluster/metrics",
                    params={"user.name": self.user},
                    timeout=5,
                    trust_env=False,
                    auth=self.auth,
                    follow_redirects=True,
                )
                said = answer.text
                if answer.json()["clusterMetrics"]["activeNodes"] == count:
                    return
            except (httpx2.HTTPError, ValueError, KeyError) as error:
                said = repr(error)
            time.sleep(0.2)
        raise AssertionError(f"{count} nodes did not come within {_START_SECONDS:g} s; the last answer: {said[:500]}")

    def _configure(self) -> None:
        for name in ("conf", "conf2", "logs", "state", "services", "zookeeper"):
            (self.folder / name).mkdir()
        framework = self.folder / "framework.tar.gz"
        with tarfile.open(framework, "w:gz", compresslevel=0) as archive:
            for jar in sorted(hadoop_lib().glob("*.jar")):
                archive.add(jar, jar.name)
        common = self._common(framework)
        core = self._core()
        kinds = {"yarn.resource-types": "yarn.io/gpu"}
        scheduler = {
            "yarn.scheduler.capacity.root.queues": "default",
            "yarn.scheduler.capacity.root.default.capacity": "100",
            "yarn.scheduler.capacity.maximum-am-resource-percent": "0.5",
            "yarn.scheduler.capacity.resource-calculator": (
                "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator"
            ),
            **self._more_scheduler,
        }
        master_log = _LOG4J.format(file="${LOG_DIR}/serviceam.log")
        others = {"core-site": core, "resource-types": kinds, "capacity-scheduler": scheduler}
        for name, conf in zip(self._masters, (self.folder / "conf", self.folder / "conf2"), strict=False):
            own = {"yarn.resourcemanager.ha.id": name} if len(self._masters) > 1 else {}
            _write(conf, {"yarn-site": common | own, **others})
            (conf / "yarnservice-log4j.properties").write_text(master_log)
        for number in range(self._count):
            folder = self.folder / f"nm{number}" / "conf"
            folder.mkdir(parents=True)
            _write(folder, {"core-site": core, "yarn-site": common | self._node(number), "resource-types": kinds})

    def _core(self) -> dict[str, str]:
        proxy = f"hadoop.proxyuser.{self.user}"
        return {
            "fs.defaultFS": "file:///",
            "hadoop.tmp.dir": f"{self.folder}/state/tmp",
            "hadoop.registry.zk.quorum": f"127.0.0.1:{self._rm_ports[5]}",
            "hadoop.http.filter.initializers": (
                "org.apache.hadoop.security.authentication.server.ProxyUserAuthenticationFilterInitializer"
            ),
            "hadoop.http.authentication.type": "simple",
            "hadoop.http.authentication.simple.anonymous.allowed": "false",
            f"{proxy}.hosts": "*",
            f"{proxy}.users": "*",
            **self._more_core,
        }

    def _common(self, framework: Path) -> dict[str, str]:
        rm = "yarn.resourcemanager"
        names = ("address", "scheduler.address", "resource-tracker.address", "admin.address", "webapp.address")
        addresses = {f"{rm}.{name}": f"127.0.0.1:{port}" for name, port in zip(names, self._rm_ports, strict=False)}
        if len(self._masters) > 1:
            addresses = {
                f"{rm}.{name}.{master}": f"127.0.0.1:{port}"
                for master, ports in (("rm", self._rm_ports), ("rm2", self._rm2_ports))
                for name, port in zip(names, ports, strict=False)
            }
            addresses |= {
                f"{rm}.ha.enabled": "true",
                f"{rm}.ha.rm-ids": "rm,rm2",
                f"{rm}.cluster-id": "dl2d",
                "hadoop.zk.address": f"127.0.0.1:{self._rm_ports[5]}",
                f"{rm}.zk-timeout-ms": "4000",
                "hadoop.zk.timeout-ms": "4000",
            }
        store = "ZKRMStateStore" if len(self._masters) > 1 else "FileSystemRMStateStore"
        return {
            **addresses,
            f"{rm}.hostname": "127.0.0.1",
            f"{rm}.bind-host": "127.0.0.1",
            f"{rm}.recovery.enabled": "true",
            f"{rm}.store.class": f"org.apache.hadoop.yarn.server.resourcemanager.recovery.{store}",
            f"{rm}.fs.state-store.uri": f"file://{self.folder}/state/rm",
            f"{rm}.am.max-attempts": "20",
            f"{rm}.nodemanagers.heartbeat-interval-ms": "500",
            "yarn.webapp.api-service.enable": "true",
            "yarn.scheduler.minimum-allocation-mb": "64",
            "yarn.scheduler.maximum-allocation-vcores": "64",
            "yarn.scheduler.maximum-allocation-mb": "65536",
            "yarn.acl.enable": "false",
            "yarn.nm.liveness-monitor.expiry-interval-ms": "12000",
            # Masters and nodes find a ResourceManager that is back at once, instead of within half a minute.
            f"{rm}.connect.retry-interval.ms": "500",
            "yarn.client.failover-sleep-base-ms": "100",
            "yarn.client.failover-sleep-max-ms": "1000",
            "yarn.service.framework.path": f"file://{framework}",
            "yarn.service.base.path": f"file://{self.folder}/services",
            "yarn.service.am.java.opts": f"-Xmx200m {' '.join((*_SHORT_LIVED, *_OPEN_PACKAGES))}",
            "yarn.service.am-resource.memory": "384",
            "yarn.service.readiness-check-interval.seconds": "1",
            "yarn.service.container-failure.retry-interval-ms": "500",
            "yarn.application.classpath": f"{hadoop_lib()}/*",
            **self._more,
        }

    def _node(self, number: int) -> dict[str, str]:
        nm = "yarn.nodemanager"
        ports = self._node_ports[_NODE_PORTS * number : _NODE_PORTS * (number + 1)]
        names = ("address", "localizer.address", "webapp.address", "collector-service.address", "amrmproxy.address")
        # YARN knows attributes by host: nodes that differ in them have hosts of their own.
        host = f"127.0.0.{number + 1 if self._of_nodes else 1}"
        addresses = {f"{nm}.{name}": f"{host}:{port}" for name, port in zip(names, ports, strict=True)}
        more = self._of_nodes[number] if self._of_nodes else {}
        folder = self.folder / f"nm{number}"
        return {
            **addresses,
            **self._capacity,
            f"{nm}.hostname": host,
            f"{nm}.local-dirs": f"{folder}/local",
            f"{nm}.log-dirs": f"{folder}/logs",
            f"{nm}.recovery.enabled": "true",
            f"{nm}.recovery.dir": f"{folder}/recovery",
            f"{nm}.recovery.supervised": "true",
            f"{nm}.pmem-check-enabled": "false",
            f"{nm}.vmem-check-enabled": "false",
            f"{nm}.disk-health-checker.max-disk-utilization-per-disk-percentage": "99.9",
            f"{nm}.sleep-delay-before-sigkill.ms": "2000",
            **more,
        }


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, kill those that do not within some seconds, and wait until all have ended."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _write(folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
    """Write Hadoop's configuration files."""
    for name, properties in files.items():
        lines = [
            f"<property><name>{key}</name><value>{xml.sax.saxutils.escape(value)}</value></property>"
            for key, value in properties.items()
        ]
        (folder / f"{name}.xml").write_text("\n".join(["<configuration>", *lines, "</configuration>"]))
