"""The models of the training steps. The workers of both sides build them from these numbers."""

import argparse
from dataclasses import dataclass

VOCABULARY = 1024  # of the transformer
CLASSES = 10  # of the conv net


@dataclass(frozen=True)
class Model:
    name: str
    layers: int  # linear ones; two parameters each
    width: int
    steps: int  # in one round of one mode
    kind: str = "chain"
    batch: int = 32

    def tensors(self):
        """(number of parameters, their elements)."""
        w = self.width
        if self.kind == "chain":
            return 2 * self.layers, self.layers * (w + 1) * w
        if self.kind == "conv":
            return conv_tensors(self.layers, w)
        block = 12 * w * w + 13 * w
        return 12 * self.layers + 5, self.layers * block + 2 * w + VOCABULARY * (2 * w + 1)

    def megabytes(self):
        return self.tensors()[1] * 4 / 1e6

    def describe(self):
        return f"{self.tensors()[0]} parameters, {self.megabytes():.1f} MB"

    def arguments(self):
        numbers = {"layers": self.layers, "width": self.width, "batch": self.batch}
        return [f"--model={self.kind}", *(f"--{name}={n}" for name, n in numbers.items())]


def conv_tensors(blocks, width):
    layers = [(3, width)]
    for stage in range(3):
        channels = width << stage
        layers += [(channels // 2, channels)] if stage else []
        layers += [(channels, channels)] * (2 * blocks)
    elements = sum(9 * before * after + 2 * after for before, after in layers)
    return 3 * len(layers) + 2, elements + CLASSES * (4 * width + 1)


MODELS = [
    Model("small", 500, 16, 10),
    Model("medium", 50, 256, 10),
    Model("large", 24, 1024, 4),
]
MORE_MODELS = [
    Model("conv", 2, 32, 4, kind="conv", batch=16),
    Model("transformer", 4, 192, 4, kind="transformer", batch=256),
]


def parse_models(text):
    names = {model.name: model for model in MODELS + MORE_MODELS}
    unknown = [name for name in text.split(",") if name not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"no model {unknown[0]}; there are {', '.join(names)}")
    return [names[name] for name in text.split(",")]
