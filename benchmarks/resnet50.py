"""The tensors of a model that everybody knows, for benchmarks of how they travel."""

from __future__ import annotations


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 161 trainable tensors (He et al. 2016): 25,557,032 numbers."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, before, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]
