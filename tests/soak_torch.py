"""A long run of `cupyflash.torch.attention` on a GPU where memory is short: `python -m tests.soak_torch`.

Each step is a forward and a backward on each of three streams, of inputs that nothing keeps. Beside them tensors of
random sizes, full of NaN, come and go, so that torch's caching allocator has to give memory back and ask for it again.
Every result is compared, bit for bit, with what a quiet GPU computed first, and the memory in use at the end with that
after the first hundred steps.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from cupyflash.torch import attention

LIMIT_BYTES = 512 << 20  # all that torch may hold
NOISE_BYTES = 128 << 20  # of it in noise at a time, at most
LARGEST_NOISE_BYTES = 32 << 20
NUM_NOISE_STREAMS = 6  # each of which caches memory that no other may use
SETTLED_STEPS = 100

# q's shape, KV heads and options, for each stream
PROBLEMS: list[tuple[tuple[int, int, int, int], int, dict[str, Any]]] = [
    ((2, 257, 8, 64), 2, {"causal": True}),
    ((1, 500, 4, 128), 4, {"window": (100, 0), "softcap": 20.0}),
    ((3, 131, 6, 40), 3, {"causal": True, "dropout_p": 0.1, "seed": 5}),
]


@dataclass
class Lane:
    """One problem on a stream of its own."""

    stream: torch.cuda.Stream
    inputs: list[torch.Tensor]
    options: dict[str, Any]
    right: list[torch.Tensor]
    num_wrong: torch.Tensor  # on the GPU, so that nobody waits for it

    def step(self) -> None:
        with torch.cuda.stream(self.stream):
            for found, right in zip(results(self.inputs, self.options), self.right, strict=True):
                self.num_wrong += (found != right).any()


def results(inputs: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    """out, lse, dq, dk and dv, from copies whose memory is free again when this returns."""
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    out, lse = attention(q, k, v, deterministic=True, **options)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    return [out.detach(), lse.detach(), *grads]


def lane(shape: tuple[int, int, int, int], heads_kv: int, options: dict[str, Any]) -> Lane:
    batch, length, heads, dim = shape
    shapes = [(batch, length, n, dim) for n in (heads, heads_kv, heads_kv)]
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    right = results(inputs, options)
    return Lane(torch.cuda.Stream(), inputs, options, right, torch.zeros((), dtype=torch.int64, device="cuda"))


def renew(noise: list[torch.Tensor], stream: torch.cuda.Stream) -> None:
    """One tensor of noise more, on that stream, and as many fewer as it takes."""
    num_bytes = random.randrange(4, LARGEST_NOISE_BYTES)
    while sum(x.nbytes for x in noise) + num_bytes > NOISE_BYTES:
        noise.pop(random.randrange(len(noise)))
    with torch.cuda.stream(stream):
        noise.append(torch.full((num_bytes // 4,), torch.nan, device="cuda"))


def bytes_in_use() -> int:
    """The least of a second, as torch's own thread for backwards may hold a step's gradients beyond the step."""
    torch.cuda.synchronize()
    readings = []
    for _ in range(20):
        time.sleep(0.05)
        readings.append(torch.cuda.memory_allocated())
    return min(readings)


def main(arguments: list[str] | None = None) -> int:
    """0 if no bit was wrong, no memory was lost, and memory was short."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak_torch", description="A long run where memory is short.")
    parser.add_argument("--steps", type=int, default=1000, help="default: %(default)s")
    num_steps = parser.parse_args(arguments).steps
    if num_steps <= SETTLED_STEPS:
        parser.error(f"--steps {num_steps}: more than {SETTLED_STEPS}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU that torch can use")
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / torch.cuda.get_device_properties(0).total_memory)

    lanes = [lane(*problem) for problem in PROBLEMS]
    streams = [one.stream for one in lanes] + [torch.cuda.Stream() for _ in range(NUM_NOISE_STREAMS)]
    noise: list[torch.Tensor] = []
    used: list[int] = []
    torch.cuda.synchronize()
    for number in range(1, num_steps + 1):
        for one in random.sample(lanes, len(lanes)):
            renew(noise, random.choice(streams))
            one.step()
        if number in (SETTLED_STEPS, num_steps):
            noise.clear()
            used.append(bytes_in_use())

    num_wrong = sum(int(one.num_wrong) for one in lanes)
    num_retries = torch.cuda.memory_stats()["num_alloc_retries"]
    print(f"{num_steps} steps on {len(lanes)} streams: {num_wrong} results with a wrong bit")
    print(f"bytes in use after {SETTLED_STEPS} steps {used[0]:,}, after {num_steps} {used[1]:,}")
    print(f"the allocator gave its cache back {num_retries} times for want of memory")
    is_good = num_wrong == 0 and used[0] == used[1] and num_retries > 0
    print("good" if is_good else "NOT GOOD")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
