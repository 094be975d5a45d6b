"""A rank of bench/time-to-loss, which starts the ranks and writes jobs into a pipe. A job is a training, whose losses
and bytes are recorded in each step, or a few steps with a tiny batch, whose time is that of the exchange."""

import importlib
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

HERE = pathlib.Path(__file__).resolve().parent
HEADS, PIECE, READ, SHORT = 4, 1 << 12, 1 << 22, 3


class Block(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for one in (self.attend, self.project, self.wide, self.narrow):
            scale = (2 * layers) ** -0.5 if one in (self.project, self.narrow) else 1
            nn.init.normal_(one.weight, std=0.02 * scale)
            nn.init.zeros_(one.bias)

    def forward(self, hidden):
        batch, length, width = hidden.shape
        parts = self.attend(self.norms[0](hidden)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width / HEADS)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.narrow(nn.functional.gelu(self.wide(self.norms[1](hidden))))


class Transformer(nn.Module):
    """A transformer on bytes, initialised as GPT-2 is. Its output matrix is its table of input embeddings."""

    def __init__(self, width, layers, context):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.01)
        self.blocks = nn.Sequential(*(Block(width, layers) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, text):
        hidden = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        return self.norm(self.blocks(hidden)) @ self.bytes.weight.t()


def read(folder):
    """Returns the first bytes of a folder's text files in two parts: of ten pieces nine are for training, one for
    validation."""
    content, path = bytearray(), pathlib.Path(folder)
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file() and file.suffix not in (".pyc", ".so", ".a") and len(content) < READ:
            content += file.read_bytes()
    pieces = torch.tensor(content[:READ], dtype=torch.uint8).long().split(PIECE)
    return torch.cat([one for k, one in enumerate(pieces) if k % 10]), torch.cat(pieces[::10])


def loss_of(model, text, random, batch, context):
    starts = torch.randint(len(text) - context, (batch,), generator=random).tolist()
    rows = torch.stack([text[at : at + context + 1] for at in starts])
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def sent():
    """Returns the bytes that this host's eth0 has sent so far, by the kernel's counter."""
    line = next(one for one in open("/proc/net/dev") if one.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def copy_all(parameters, values):
    for one, value in zip(parameters, values):
        one.copy_(value.view_as(one))


def mean_of_ranks(values, choose=statistics.mean):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    return [choose(of) for of in zip(*everyone)]


def slowest(seconds):
    """Returns the seconds of each step so that the sum up to a step is that of the slowest rank up to there. Between
    two exchanges each rank may be the slowest in some steps."""
    until = mean_of_ranks(list(itertools.accumulate(seconds)), max)
    return [until[0], *(after - before for before, after in itertools.pairwise(until))]


class Training:
    """A model trained by a method, step by step, with the bytes and the seconds of each step."""

    def __init__(self, job, texts):
        self.job, (self.text, self.validation) = job, texts
        torch.manual_seed(job["seed"])
        self.plain = Transformer(job["width"], job["layers"], job["context"])
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=job["rate"], betas=(0.9, 0.95), weight_decay=0.1)
        make, begin = importlib.import_module(job["file"]).METHODS[job["method"]], time.perf_counter()
        self.model, self.optimizer, self.close = make(self.plain, optimizer, self.short)
        self.made = time.perf_counter() - begin  # auto measures exchanges in this time
        self.random = torch.Generator().manual_seed(1000 * job["seed"] + dist.get_rank())
        self.bytes, self.seconds, self.core_seconds = [], [], []
        self.methods = {}  # with auto: the first step of each chosen method

    def short(self, steps):
        """Returns the number of steps. A run that only measures times makes only a few of each kind of step."""
        return min(steps, SHORT) if self.job["kind"] == "time" else steps

    def step(self, batch, context):
        rate = self.job["rate"] * min(1, (len(self.bytes) + 1) / self.job["rise"])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        begin, begin_core, before = time.perf_counter(), time.process_time(), sent()
        self.optimizer.zero_grad()
        loss_of(self.model, self.text, self.random, batch, context).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begin)
        self.core_seconds.append(time.process_time() - begin_core)
        self.bytes.append(sent() - before)
        now = getattr(getattr(self.optimizer, "automatic", None), "method", None)
        if now not in (None, *list(self.methods.values())[-1:]):
            self.methods[len(self.bytes)] = now

    @torch.no_grad()
    def validate(self):
        """Returns the loss of the mean of the ranks' models, which differ between two outer steps, on this rank's part
        of the validation sequences. These are always the same."""
        parameters, own = list(self.plain.parameters()), [one.detach().clone() for one in self.plain.parameters()]
        mean = torch.cat([one.flatten() for one in own]) / dist.get_world_size()
        dist.all_reduce(mean)
        copy_all(parameters, mean.split([one.numel() for one in own]))
        random = torch.Generator().manual_seed(7 + dist.get_rank())
        batch, context = self.job["validation"], self.job["context"]
        loss = loss_of(self.plain, self.validation, random, batch, context).item()
        copy_all(parameters, own)
        return loss


def train(training):
    """Trains up to the last step, and further until the loss has reached the target."""
    job, own = training.job, []
    for step in range(1, job["most"] + 1):
        training.step(job["batch"], job["context"])
        if step % job["every"] == 0:
            own.append(training.validate())
            if step >= job["steps"] and (job["target"] is None or min(mean_of_ranks(own)) <= job["target"]):
                break
    training.seconds[0] += training.made
    losses = dict(zip(range(job["every"], len(training.bytes) + 1, job["every"]), mean_of_ranks(own)))
    return {"losses": losses, "bytes": mean_of_ranks(training.bytes), "seconds": slowest(training.seconds),
            "methods": training.methods}  # fmt: skip


def take_times(training):
    """Measures steps that compute next to nothing: their seconds on the slowest rank, and for how long of these a
    rank's processor core is busy. Also measures the computation of a batch."""
    job, computation = training.job, []
    for _ in range(job["steps"]):
        dist.barrier()
        before = sent()
        training.step(1, 8)
        dist.barrier()  # waits for messages that are still being sent
        training.bytes[-1] = sent() - before
    for _ in range(7):
        begin = time.process_time()
        loss_of(training.plain, training.text, training.random, job["batch"], job["context"]).backward()
        computation.append(time.process_time() - begin)
    return {"bytes": mean_of_ranks(training.bytes), "seconds": mean_of_ranks(training.seconds, max),
            "core_seconds": mean_of_ranks(training.core_seconds), "computation": mean_of_ranks([min(computation)])[0]}  # fmt: skip


def answer(job, texts):
    """Runs one job, and writes the job's result to a file."""
    data, begin = job["data"], time.perf_counter()
    texts[data] = texts[data] if data in texts else read(data)
    training = Training(job, texts[data])
    result = (take_times if job["kind"] == "time" else train)(training)
    if training.close is not None:
        training.close()
    if dist.get_rank() == 0:
        result = {**job, **result, "took": round(time.perf_counter() - begin, 1)}
        new = pathlib.Path(job["result"] + ".new")
        new.write_text(json.dumps(result) + "\n")
        new.rename(job["result"])
        print("done", flush=True)


def main():
    """Runs the jobs. Each line of the pipe is a job; rank 0 reads the lines."""
    sys.path[:0] = [str(HERE / "methods"), str(HERE.parent / "bindings" / "python")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines, texts = open(sys.argv[1]) if dist.get_rank() == 0 else None, {}
    while True:
        job = [json.loads(lines.readline() or "null") if lines else None]
        dist.broadcast_object_list(job)
        if job[0] is None:
            break
        answer(job[0], texts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
