"""The oracle's models, as PyTorch modules. models.cc has the same ones, with the same names.

Every model maps a batch (x, y) and where it stands (rank, step) to a loss; the parameters'
names and their order of registration are what both sides compare.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Of every recorded tensor of inputs: [ranks, steps, micro-batches, samples, ...].
RANKS, STEPS, MICRO_BATCHES, SAMPLES = 3, 5, 2, 4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc3(torch.tanh(self.fc2(torch.relu(self.fc1(x)))))

    def loss(self, model, x, y, rank, step):
        return functional.mse_loss(model(x), y)

    def batches(self, shape):
        return torch.randn(*shape, 8), torch.randn(*shape, 4)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.norm2 = nn.BatchNorm2d(6)
        self.fc = nn.Linear(24, 5)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.fc(x.flatten(1))

    def loss(self, model, x, y, rank, step):
        return functional.cross_entropy(model(x), y)

    def batches(self, shape):
        return torch.randn(*shape, 1, 8, 8), torch.randint(5, shape)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x):
        samples, length, width = x.shape
        qkv = self.qkv(x).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.5, -1)
        return self.out(torch.matmul(weights, v).transpose(1, 2).reshape(samples, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """The embedding's weight is also the output's: one parameter that is used twice."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(6, 8))
        self.embed = nn.Embedding(12, 8)
        self.block1 = Block(8, 2)
        self.block2 = Block(8, 2)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.norm(self.block2(self.block1(self.embed(x) + self.position)))
        return functional.linear(x, self.embed.weight)

    def loss(self, model, x, y, rank, step):
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def batches(self, shape):
        return torch.randint(12, (*shape, 6)), torch.randint(12, (*shape, 6))


class SparseEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 6, sparse=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(torch.tanh(self.embed(x).mean(1)))

    def loss(self, model, x, y, rank, step):
        return functional.mse_loss(model(x), y)

    def batches(self, shape):
        return torch.randint(20, (*shape, 3)), torch.randn(*shape, 3)


class Branches(nn.Module):
    """`left` is used on rank 0 only, `right` in odd steps, `never` nowhere."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, use_left, use_right):
        x = torch.tanh(self.trunk(x))
        if use_left:
            x = x + torch.tanh(self.left(x))
        if use_right:
            x = x + torch.tanh(self.right(x))
        return self.head(x)

    def loss(self, model, x, y, rank, step):
        return functional.mse_loss(model(x, rank == 0, step % 2 == 1), y)

    def batches(self, shape):
        return torch.randn(*shape, 6), torch.randn(*shape, 3)


class Segment(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.fc(x))


class Checkpointed(nn.Module):
    """A re-entrant checkpoint of a segment that is used twice, and a layer that never is."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.segment = Segment()
        self.spare = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = checkpoint(self.segment, x, use_reentrant=True)
        x = checkpoint(self.segment, x, use_reentrant=True)
        return self.last(x)

    def loss(self, model, x, y, rank, step):
        return functional.mse_loss(model(x), y)

    def batches(self, shape):
        return torch.randn(*shape, 6), torch.randn(*shape, 3)


class Wide(nn.Module):
    """Large enough for the default limits of buckets to matter. Starts as zeros: not stored."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(8))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, model, x, y, rank, step):
        return model(x.expand(-1, 300)).sum()

    def batches(self, shape):
        return torch.zeros(*shape, 1), torch.zeros(*shape, 1)


MODELS = {
    "mlp": Mlp,
    "conv": ConvNet,
    "transformer": Transformer,
    "embedding": SparseEmbedding,
    "branches": Branches,
    "checkpointed": Checkpointed,
    "wide": Wide,
}
# Whose values are not worth storing.
BUCKETS_ONLY = ("wide",)


def initial_tensors():
    """Weights, buffers and batches of every model: what both sides start from."""
    tensors = {}
    for number, (name, model_class) in enumerate(MODELS.items()):
        torch.manual_seed(20 + number)
        model = model_class()
        if name not in BUCKETS_ONLY:
            for key, value in model.state_dict().items():
                tensors[f"{name}/state/{key}"] = value
        x, y = model.batches((RANKS, STEPS, MICRO_BATCHES, SAMPLES))
        tensors[f"{name}/x"], tensors[f"{name}/y"] = x, y
    tensors["rpc/table"] = torch.randn(20, 8)  # as many rows as `embedding`, of the width of `mlp`
    return tensors
