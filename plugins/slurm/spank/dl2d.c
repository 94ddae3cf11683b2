/* SPANK plug-in: options of sbatch for elastic jobs, checked when a job is submitted.

   Each option sets one key of #DL2 lines, by the table OPTIONS. The plug-in writes the values into the job's control
   environment as DL2_<KEY>: job_submit.lua finds them there, and the job as SLURM_SPANK_DL2_<KEY>. A value that passes
   here may still be refused by the daemon, which knows the site's models, limits and nodes.

   Build:  gcc -shared -fPIC -O2 -Wall -o dl2d_spank.so dl2d.c */

#include <ctype.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

SPANK_PLUGIN(dl2, 1)

/* Longest value, also in job_submit.lua. */
#define MAX_VALUE 256

enum kind { NAME, NUMBER, WHOLE, COUNTS, DEMAND, ARCHITECTURE, DURABILITY };

/* What messages say of each kind. */
static const char *const EXPECTED[] = {
    [NAME] = "a name of 1 to 128 characters (A-Z a-z 0-9 _ . + / : -) that begins with a letter or digit",
    [NUMBER] = "a number",
    [WHOLE] = "a whole number",
    [COUNTS] = "numbers of workers such as 1,2,4, each from 1 to 10000, or powers-of-two",
    [DEMAND] = "amounts of resources such as cpu:2,gpu:1,memory:4G",
    [ARCHITECTURE] = "ps or allreduce",
    [DURABILITY] = "none or durable",
};

static const struct {
    char *name, *key, *argument, *usage;
    enum kind kind;
    double least, most; /* of numbers */
} OPTIONS[] = {
    {"dl2-model", "MODEL", "NAME", "dl2d: type of the model", NAME, 0, 0},
    {"dl2-epochs", "EPOCHS", "N", "dl2d: passes over the data set", NUMBER, 0, 1e6},
    {"dl2-samples-per-epoch", "SAMPLES_PER_EPOCH", "N", "dl2d: samples of the data set", NUMBER, 0, 1e15},
    {"dl2-steps-per-epoch", "STEPS_PER_EPOCH", "N", "dl2d: steps of one pass", NUMBER, 0, 1e12},
    {"dl2-batch", "BATCH", "N", "dl2d: global batch size in samples", WHOLE, 1, 1e9},
    {"dl2-worker", "WORKER", "RESOURCES", "dl2d: demand of one worker, such as cpu:2,gpu:1,memory:4G", DEMAND, 0, 0},
    {"dl2-ps", "PS", "RESOURCES", "dl2d: demand of one parameter server", DEMAND, 0, 0},
    {"dl2-min-workers", "MIN_WORKERS", "N", "dl2d: minimum number of workers", WHOLE, 1, 1e4},
    {"dl2-max-workers", "MAX_WORKERS", "N", "dl2d: maximum number of workers", WHOLE, 1, 1e4},
    {"dl2-min-ps", "MIN_PS", "N", "dl2d: minimum number of parameter servers", WHOLE, 0, 1e4},
    {"dl2-max-ps", "MAX_PS", "N", "dl2d: maximum number of parameter servers", WHOLE, 0, 1e4},
    {"dl2-sizes", "ALLOWED_WORKERS", "N,N,...", "dl2d: possible numbers of workers, or powers-of-two", COUNTS, 0, 0},
    {"dl2-arch", "ARCHITECTURE", "NAME", "dl2d: ps or allreduce", ARCHITECTURE, 0, 0},
    {"dl2-durability", "DURABILITY", "NAME", "dl2d: none or durable", DURABILITY, 0, 0},
};
#define COUNT (sizeof OPTIONS / sizeof *OPTIONS)

/* Values that were given; empty for those that were not. */
static char values[COUNT][MAX_VALUE + 1];

/* The number of which the text consists; -1 if it is none. */
static double number(const char *text, size_t length)
{
    char copy[MAX_VALUE + 1], *end;
    if (length == 0 || length > MAX_VALUE || strspn(text, "0123456789.eE+-") < length)
        return -1;
    memcpy(copy, text, length);
    copy[length] = '\0';
    double found = strtod(copy, &end);
    return *end == '\0' ? found : -1;
}

/* One part of a demand: name:amount. Memory may have a unit. */
static int is_amount(const char *part, size_t length)
{
    size_t name = length;
    while (name > 0 && part[name - 1] != ':')
        name--;
    if (name < 2 || name > 65 || !islower((unsigned char)*part))
        return 0;
    const char *amount = part + name;
    size_t rest = length - name;
    if (name == 7 && strncmp(part, "memory:", 7) == 0) {
        if (rest > 1 && toupper((unsigned char)amount[rest - 1]) == 'B')
            rest--;
        if (rest > 2 && tolower((unsigned char)amount[rest - 1]) == 'i')
            rest--;
        if (rest > 1 && strchr("KMGT", toupper((unsigned char)amount[rest - 1])))
            rest--;
    }
    return number(amount, rest) >= 0;
}

static int is_count(const char *part, size_t length)
{
    double found = number(part, length);
    return strspn(part, "0123456789+") >= length && found >= 1 && found <= 1e4;
}

/* Whether each of the parts between commas is accepted. */
static int all_parts(const char *text, int (*accepted)(const char *, size_t))
{
    for (;; text++) {
        size_t length = strcspn(text, ",");
        if (!accepted(text, length))
            return 0;
        text += length;
        if (*text == '\0')
            return 1;
    }
}

static int is_valid(size_t at, const char *text)
{
    double found;
    switch (OPTIONS[at].kind) {
    case NAME:
        return strlen(text) <= 128 && isalnum((unsigned char)*text);
    case NUMBER:
        found = number(text, strlen(text));
        return found > 0 && found <= OPTIONS[at].most;
    case WHOLE:
        found = number(text, strlen(text));
        return found >= OPTIONS[at].least && found <= OPTIONS[at].most && found == (double)(long long)found;
    case COUNTS:
        return strcmp(text, "powers-of-two") == 0 || all_parts(text, is_count);
    case DEMAND:
        return all_parts(text, is_amount);
    case ARCHITECTURE:
        return strcmp(text, "ps") == 0 || strcmp(text, "allreduce") == 0;
    case DURABILITY:
        return strcmp(text, "none") == 0 || strcmp(text, "durable") == 0;
    }
    return 0;
}

static int set_option(int at, const char *text, int remote)
{
    (void)remote;
    size_t length = text ? strnlen(text, MAX_VALUE + 1) : 0;
    int plain = length > 0 && length <= MAX_VALUE;
    for (size_t i = 0; plain && i < length; i++)
        plain = isalnum((unsigned char)text[i]) || strchr("_.,:+/-", text[i]);
    if (plain && is_valid(at, text)) {
        memcpy(values[at], text, length + 1);
        return ESPANK_SUCCESS;
    }
    char range[80] = "";
    if (OPTIONS[at].kind == WHOLE)
        snprintf(range, sizeof range, " from %.0f to %.0f", OPTIONS[at].least, OPTIONS[at].most);
    else if (OPTIONS[at].kind == NUMBER)
        snprintf(range, sizeof range, ", more than 0 and at most %g", OPTIONS[at].most);
    slurm_error("--%s: expected %s%s, got '%.60s'", OPTIONS[at].name, EXPECTED[OPTIONS[at].kind], range,
                text ? text : "");
    return ESPANK_BAD_ARG;
}

/* Removes the options of the batch job in which sbatch runs: Slurm would take them for those of the new job. */
static void forget_outer_job(void)
{
    static const char *const PREFIXES[] = {"SLURM_SPANK_DL2_", "SLURM_SPANK__SLURM_SPANK_OPTION_dl2_",
                                           "_SLURM_SPANK_OPTION_dl2_"};
    for (size_t at = 0; at < COUNT; at++)
        for (size_t i = 0; i < sizeof PREFIXES / sizeof *PREFIXES; i++) {
            char name[96];
            snprintf(name, sizeof name, "%s%s", PREFIXES[i], i == 0 ? OPTIONS[at].key : OPTIONS[at].name);
            for (char *letter = name; i > 0 && *letter; letter++)
                *letter = *letter == '-' ? '_' : *letter;
            unsetenv(name);
        }
}

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    if (spank_context() != S_CTX_ALLOCATOR) /* sbatch and salloc */
        return ESPANK_SUCCESS;
    forget_outer_job();
    for (size_t at = 0; at < COUNT; at++) {
        struct spank_option option = {OPTIONS[at].name, OPTIONS[at].argument, OPTIONS[at].usage, 1, (int)at, set_option};
        spank_err_t failed = spank_option_register(spank, &option); /* copies all of it */
        if (failed != ESPANK_SUCCESS)
            return failed;
    }
    return ESPANK_SUCCESS;
}

int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    if (spank_context() != S_CTX_ALLOCATOR)
        return ESPANK_SUCCESS;
    for (size_t at = 0; at < COUNT; at++) {
        if (*values[at] == '\0')
            continue;
        char name[64];
        snprintf(name, sizeof name, "DL2_%s", OPTIONS[at].key);
        spank_err_t failed = spank_job_control_setenv(spank, name, values[at], 1);
        if (failed != ESPANK_SUCCESS) {
            slurm_error("--%s cannot be passed on: %s", OPTIONS[at].name, spank_strerror(failed));
            return failed;
        }
    }
    return ESPANK_SUCCESS;
}
