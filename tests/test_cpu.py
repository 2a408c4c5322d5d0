"""The compiled kernel: right for all shapes, dtypes and rules, the same for any threads, and writes only its own."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from helpers import needs_kernel, parameters, random_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from adafactor import Adafactor
from adafactor.backends import cpu, kernel, why
from adafactor.dialects import big_vision, optax
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor

pytestmark = needs_kernel

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = [*itertools.product(FLOATS, FLOATS), (torch.float64, torch.float64), (torch.float64, torch.float32)]
MANUAL = {"lr": 0.01, "relative_step": False}
RULES = {
    "torch": (Adafactor, {"lr": 0.05, "eps": (1e-7, 1e-3)}),
    "decay by lr, maximize, no clipping": (
        Adafactor,
        {"lr": 0.05, "eps": (1e-7, 1e-3), "weight_decay": 0.1, "d": None, "maximize": True},
    ),
    "large floor, matrix": (Adafactor, {"lr": 0.05, "eps": (1e-2, 1e-2), "d": 0.5, "factor": "matrix"}),
    "transformers": (TransformersAdafactor, {}),
    "momentum after, decay by alpha": (TransformersAdafactor, {"beta1": 0.9, "weight_decay": 0.1}),
    "unscaled": (TransformersAdafactor, {**MANUAL, "scale_parameter": False, "beta1": 0.5}),
    "largest": (optax.Adafactor, {"learning_rate": 0.01, "min_dim_size_to_factor": 2, "weight_decay_rate": 0.01}),
    "stacks": (optax.Adafactor, {"learning_rate": 0.01, "min_dim_size_to_factor": 2, "batch_dims": 1}),
    "momentum before": (big_vision.Adafactor, {"lr": 0.01, "momentum": 0.9, "momentum_dtype": torch.float32}),
}
SHAPES = [(5, 8), (1, 9), (9, 1), (), (1,), (300,), (2, 3, 4), (64, 33), (3, 2, 2, 2), (40, 17, 3, 3), (3, 70, 300)]


def twins(rule, start, steps, fused, *, exact=False):
    cls, options = RULES[rule] if isinstance(rule, str) else rule
    params = parameters(start, torch.float64 if exact else None)
    optimizer = cls(params, **options, fused=fused)
    path = [[p.clone() for p in start]]
    for grads in steps:
        for p, g in zip(params, grads, strict=True):
            p.grad_dtype = None
            p.grad = g.clone().double() if exact else g.clone()
        optimizer.step()
        path.append([p.detach().clone() for p in params])
    return path, optimizer


def assert_right(rule, start, steps):
    """One step is the one in float64: to 1e-6 of the largest movement (16 float32 roundings), and p's own roundings."""
    mine, _ = twins(rule, start, steps, None)
    truth, _ = twins(rule, start, steps, False, exact=True)
    for ours, exact, before in zip(mine[-1], truth[-1], start, strict=True):
        eps = torch.finfo(before.dtype).eps
        wide = before.dtype is torch.float64
        movement = float((exact - before.double()).abs().max()) if before.numel() else 0.0
        rounding = eps / 2 * 1.01 + (0 if eps > 1e-4 else eps)
        tolerance = (1e-14 if wide else 1e-6) * movement + rounding * exact.abs() + torch.finfo(before.dtype).tiny
        assert ((ours.double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize(("of_p", "of_g"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_in_every_pair_of_dtypes(rule, of_p, of_g):
    start, steps = random_steps(SHAPES, 1)
    assert_right(rule, [p.to(of_p) for p in start], [[g.to(of_g) for g in grads] for grads in steps])


@settings(deadline=None, max_examples=60)
@given(
    shape=st.one_of(
        st.lists(st.integers(0, 9), max_size=5).map(tuple),
        st.tuples(st.integers(1, 140), st.integers(1, 140)),
        st.tuples(st.sampled_from([1, 2, 63, 257, 1025]), st.sampled_from([1, 3, 15, 16, 17, 255, 256, 300, 1030])),
        st.tuples(st.just(2), st.integers(4090, 4100)),
        st.tuples(st.integers(1, 3000), st.integers(1, 3)),
    ),
    rule=st.sampled_from(sorted(RULES)),
    pair=st.sampled_from(PAIRS),
    seed=st.integers(0, 1000),
)
def test_any_shape(shape, rule, pair, seed):
    start, steps = random_steps([shape], 1, seed)
    assert_right(rule, [start[0].to(pair[0])], [[steps[0][0].to(pair[1])]])


@pytest.mark.parametrize(
    "shape", [(8, 5120), (1, 5000), (4, 11008), (20, 2, 5000), (2, 65546), (3, 65791), (2, 65539, 3)]
)
@pytest.mark.parametrize("rule", ["torch", "momentum after, decay by alpha"])
def test_few_long_rows(shape, rule):
    """As in low-rank adapters: 8 rows of the model's width."""
    start, steps = random_steps([shape], 1)
    assert_right(rule, start, steps)


@pytest.mark.parametrize("shape", [(10_000_000, 2), (2, 10_000_000), (3_000, 5_000), (20_000_000,)])
def test_sums_of_millions(shape):
    """In float32, one after the other, ten million equal squares add up to a fraction of their sum."""
    p, g = torch.full(shape, 0.5), torch.full(shape, 0.1)
    g[..., 0] = 0.3
    (_, (mine,)), ours = twins("torch", [p], [[g]], True)
    (_, (theirs,)), plain = twins("torch", [p], [[g]], False)
    step = float((theirs - p).abs().max())
    assert float((mine - theirs).abs().max()) <= 1e-5 * step + 2**-24
    for name, value in plain.state[plain.param_groups[0]["params"][0]].items():
        torch.testing.assert_close(ours.state[ours.param_groups[0]["params"][0]][name], value, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_do_not_depend_on_threads_nor_on_instruction_sets(rule, dtype):
    """Nobody wants another model from the same seed because another process was given more cores."""
    start, steps = random_steps([*SHAPES, (700, 1300), (5000, 40), (3, 90_000)], 2)
    start, steps = [p.to(dtype) for p in start], [[g.to(dtype) for g in grads] for grads in steps]
    threads, sets = torch.get_num_threads(), kernel.instruction_sets()
    paths = []
    try:
        for count, isa in [(1, -1), (2, -1), (7, -1), *((2, i) for i in range(len(sets) - 1))]:
            torch.set_num_threads(count)
            kernel.library().adafactor_choose(isa % len(sets))
            paths.append(twins(rule, start, steps, None)[0][-1])
    finally:
        torch.set_num_threads(threads)
        kernel.library().adafactor_choose(len(sets) - 1)
    for other in paths[1:]:
        assert all(torch.equal(a, b) for a, b in zip(paths[0], other, strict=True))


def test_unwritten_memory_is_never_read():
    """Deterministic mode fills what is allocated with nan."""
    start, steps = random_steps([*SHAPES, (700, 1300)], 2)
    expected, _ = twins("torch", start, steps, True)
    torch.use_deterministic_algorithms(True)
    try:
        poisoned, _ = twins("torch", start, steps, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(expected[-1], poisoned[-1], strict=True))


@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    rule=st.sampled_from(["torch", "momentum after, decay by alpha", "momentum before"]),
    dtype=st.sampled_from(FLOATS),
)
def test_nothing_outside_of_a_tensor_is_touched(shape, rule, dtype):
    """Parameters, gradients and state are often views into one large buffer, with others' values on both sides."""
    guard, numel = 64, torch.Size(shape).numel()

    def framed(values):
        storage = torch.full((numel + 2 * guard,), 7.0, dtype=values.dtype)
        inside = storage[guard : guard + numel].view(values.shape)
        inside.copy_(values)
        return storage, inside

    start, steps = random_steps([shape], 2)
    cls, options = RULES[rule]
    storages = []

    def keep(values):
        storage, inside = framed(values)
        storages.append((storage, inside.numel()))
        return inside

    numel = torch.Size(shape).numel()
    p = Parameter(keep(start[0].to(dtype)))
    optimizer = cls([p], **options)
    for name, value in optimizer.state[p].items():
        if name != "step":
            numel = value.numel()
            optimizer.state[p][name] = keep(value)
    for grads in steps:
        numel = torch.Size(shape).numel()
        g = keep(grads[0].to(dtype))
        before = g.clone()
        p.grad = g
        optimizer.step()
        assert torch.equal(g, before)
    for storage, inside in storages:
        outside = torch.cat([storage[:guard], storage[guard + inside :]])
        assert (outside == 7).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
def test_inf_and_nan_go_where_plain_pytorch_sends_them(rule, dtype):
    """Loud, and the same everywhere: a kernel that swallowed them would hide a broken run."""
    for bad in (float("inf"), float("nan"), -float("inf")):
        start, steps = random_steps([(20, 30), (40,), (3, 4, 5)], 2)
        start, steps = [p.to(dtype) for p in start], [[g.to(dtype) for g in grads] for grads in steps]
        for g in steps[0]:
            g.flatten()[7] = bad
        mine, _ = twins(rule, start, steps, None)
        plain, _ = twins(rule, start, steps, False)
        for a, b in zip(mine[-1], plain[-1], strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert b.isnan().any()


@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e-20, 1e15])
@pytest.mark.parametrize("rule", ["torch", "transformers", "large floor, matrix"])
def test_small_and_large_gradients(rule, size):
    start, steps = random_steps([(20, 30), (40,)], 1)
    steps = [[(g.sign() * size) for g in steps[0]]]
    steps[0][0][3], steps[0][1][:5] = 0, 0
    mine, _ = twins(rule, start, steps, True)
    plain, _ = twins(rule, start, steps, False)
    for a, b, before in zip(mine[-1], plain[-1], start, strict=True):
        assert a.isfinite().all()
        movement = float((b - before).abs().max())
        torch.testing.assert_close(a, b, rtol=2**-23, atol=2e-6 * movement)
        assert torch.equal(a[:1] if a.dim() == 1 else a[3], before[:1] if a.dim() == 1 else before[3])


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5, 0.9999, 1.0 - 2**-13, 2.0, 1e5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_are_torchs(dtype, decay):
    """Of every value, inf, nan and denormal ones among them, and to values of every size: p - decay p, rounded once."""
    p = Parameter(torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype))
    values = p.detach().clone()
    optimizer = TransformersAdafactor(
        [p], lr=1.0, relative_step=False, scale_parameter=False, weight_decay=decay, fused=True
    )
    p.grad = torch.zeros_like(p)
    optimizer.step()
    wide = values.float()
    expected = (wide - wide * torch.tensor(decay)).to(dtype) if decay else values
    assert torch.equal(p.detach().isnan(), expected.isnan())
    assert torch.equal(p.detach().nan_to_num(7.0), expected.nan_to_num(7.0))


def test_autograd_sees_the_writes():
    """A backward through a value that a step has overwritten is an error, and not a wrong gradient."""
    p = Parameter(torch.randn(4, 4))
    optimizer = Adafactor([p], fused=True)
    loss = (p * p).sum()
    p.grad = torch.ones(4, 4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_threads_may_step_two_optimizers():
    start, steps = random_steps([(300, 200), (50,)] * 4, 10)
    expected, _ = twins("transformers", start, steps, True)
    results = {}

    def work(name):
        results[name] = twins("transformers", start, steps, True)[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for path in results.values():
        assert all(torch.equal(a, b) for a, b in zip(path[-1], expected[-1], strict=True))
    assert len(results) == 2


def test_other_python_threads_run_during_a_sweep():
    """A data loader's thread must not wait for a step of a large model."""
    start, steps = random_steps([(3000, 3000)], 1)
    p = parameters(start)[0]
    optimizer = Adafactor([p], fused=True)
    p.grad = steps[0][0]
    optimizer.step()
    inside, ticks = threading.Event(), []
    observe = kernel.library().adafactor_observe

    class Marked:
        def __call__(self, pointer):
            inside.set()
            result = observe(pointer)
            inside.clear()
            return result

    library = kernel.library()
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            if inside.is_set():
                ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        library.adafactor_observe = Marked()
        for _ in range(20):
            optimizer.step()
    finally:
        library.adafactor_observe = observe
        stop.set()
        thread.join()
    # With the lock held, at most a switch on each side of a call would get in.
    assert len(ticks) > 200


def test_a_step_keeps_nothing_alive():
    """Gradients that are set to None, and state that is moved away, must leave memory at once."""
    p = Parameter(torch.randn(8, 8))
    optimizer = Adafactor([p], fused=True)
    p.grad = torch.randn(8, 8)
    optimizer.step()
    g, row = weakref.ref(p.grad), weakref.ref(optimizer.state[p]["row_var"])
    p.grad = None
    optimizer.state[p]["row_var"] = optimizer.state[p]["row_var"].clone()
    gc.collect()
    assert g() is None
    assert row() is None


PEAK = """
import re, torch
from adafactor import Adafactor
def read(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
shape, dtype = {shape}, torch.{dtype}
p = torch.nn.Parameter(torch.randn(shape).to(dtype)); p.grad = torch.randn(shape).to(dtype)
options = {options}
optimizer = Adafactor([p], fused=True, **options)
if options:
    optimizer.state[p]["compensation"].fill_(0)  # its pages
held = sum(x.numel() * x.element_size() for x in optimizer.state[p].values())
small = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype)); small.grad = torch.ones(64, 64, dtype=dtype)
other = Adafactor([small], fused=True, **options)
for _ in range(3):
    other.step()  # code, threads and the state's pages
optimizer.state[p]["row_var"].fill_(1); optimizer.state[p]["col_var"].fill_(1)
import gc; gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = read("VmRSS")
for _ in range(3):
    optimizer.step()
print((read("VmHWM") - before) / (p.numel() * p.element_size()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the process from Linux")
@pytest.mark.parametrize("options", [{}, {"rounding": "kahan", "skip_nonfinite": True}], ids=["default", "kahan"])
@pytest.mark.parametrize(("shape", "dtype"), [((4096, 4096), "bfloat16"), ((8192, 4096), "bfloat16")])
def test_a_step_takes_no_memory(shape, dtype, options):
    """At most 1% of the parameter, what is kept between steps included."""
    code = PEAK.format(shape=shape, dtype=dtype, options=options)
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(run.stdout) <= 0.01


# Around the step


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype):
    start, steps = random_steps([(4, 3)] * 20, 3)
    expected, _ = twins("torch", start, steps, True)
    torch.set_default_dtype(dtype)
    try:
        path, _ = twins("torch", start, steps, True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(path[-1], expected[-1], strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_the_default_device_does_not_matter(fused):
    """Who makes a model on a device by default may have some parameters on the CPU."""
    start, steps = random_steps([(4, 3), (5,)], 3)
    expected, _ = twins("momentum after, decay by alpha", start, steps, fused)
    with torch.device("meta"):
        path, optimizer = twins("momentum after, decay by alpha", start, steps, fused)
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(path[-1], expected[-1], strict=True))


def test_modes_that_watch_operations_see_them():
    """A kernel behind PyTorch's back would make a profiler of operations blind, and write to fake memory."""

    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    p = strided(lambda: torch.randn(6, 5))
    optimizer = Adafactor([p])
    optimizer.step()
    with Counting() as mode:
        assert "dispatch mode" in why(optimizer)[0].reason
        optimizer.step()
    assert mode.seen > 10
    assert why(optimizer)[0].backend == "cpu"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_can_step_a_small_model():
    """The pool's other threads do not live in it: who waits for them hangs for ever. As in torch, up to some size."""
    start, steps = random_steps([(64, 64), (20, 30), (64,)], 1)
    params = parameters(start)
    optimizer = Adafactor(params, fused=True)
    for p, g in zip(params, steps[0], strict=True):
        p.grad = g
    optimizer.step()
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)


def test_denormal_numbers_of_float16_where_the_processor_flushes_floats():
    p, q = Parameter(torch.tensor([3e-5, 1.0]).half()), Parameter(torch.tensor([3e-5, 1.0]).half())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormal numbers")
    try:
        for x, fused in ((p, True), (q, False)):
            x.grad = torch.tensor([0.0, 3e-5]).half()
            Adafactor([x], lr=0.1, eps=(1e-12, 1e-3), fused=fused).step()
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(p, q)
    assert float(p.detach()[0]) == pytest.approx(3e-5, rel=1e-2)
    assert float(p.detach()[1]) < 0.95


@pytest.mark.parametrize("fused", [None, False])
def test_inference_mode_may_come_and_go(fused):
    p = strided(lambda: torch.randn(4, 4))
    optimizer = Adafactor([p], fused=fused)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 2


def test_an_error_in_a_sweep_keeps_nothing_alive(monkeypatch):
    p = strided(lambda: torch.randn(4, 4))
    optimizer = Adafactor([p])
    optimizer.step()

    def fail(batch):
        raise MemoryError

    monkeypatch.setattr(cpu, "measure", fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    g = weakref.ref(p.grad)
    p.grad = None
    gc.collect()
    assert g() is None


# What is remembered of a step


def follow(change, shapes=((6, 5), (7,)), options=(), steps=4):
    """The parameters after steps with a change before the third, by the kernel and by plain PyTorch."""
    results = []
    for fused in (None, False):
        start, grads = random_steps(shapes, steps)
        params = parameters(start)
        optimizer = Adafactor(params, lr=0.1, fused=fused, **dict(options))
        for t in range(steps):
            if t == 2:
                change(optimizer, params)
            for p, g in zip(params, grads[t], strict=True):
                p.grad = None
                p.grad = g.to(p.dtype)[: len(p)]
            optimizer.step()
        results.append([p.detach().float() for p in params])
    for mine, plain in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=4 * 2**-24, atol=1e-7)


def replace_state(optimizer, params):
    for p in params:
        optimizer.state[p] = {name: value.clone() for name, value in optimizer.state[p].items()}


def move_storage(optimizer, params):
    for p in params:
        p.data = p.data.clone()
        for value in optimizer.state[p].values():
            value.data = value.data.clone()


def load(optimizer, params):
    optimizer.load_state_dict(optimizer.state_dict())


def shrink(optimizer, params):
    params[0].data, params[1].data = params[0].data[:4], params[1].data[:3]
    for p in params:
        optimizer.state[p].clear()


def lower(optimizer, params):
    for p in params:
        p.data = p.data.bfloat16()


def new_options(optimizer, params):
    optimizer.param_groups[0].update(lr=0.01, weight_decay=0.3, d=None)


def another_group(optimizer, params):
    optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})


def test_another_dtype_of_momentum_is_followed():
    p = strided(lambda: torch.randn(4, 4))
    optimizer = big_vision.Adafactor([p], lr=0.1, momentum_dtype=torch.float32)
    optimizer.step()
    optimizer.param_groups[0]["momentum_dtype"] = torch.bfloat16
    optimizer.step()
    assert optimizer.state[p][optimizer.layout.momentum].dtype is torch.bfloat16


def test_a_state_that_has_shrunk_is_refused():
    """The kernel would write where it was."""
    p = strided(lambda: torch.randn(4, 4))
    optimizer = Adafactor([p])
    optimizer.step()
    row = optimizer.state[p]["row_var"]
    row.data = row.data[:1]
    with pytest.raises(ValueError, match="should keep the shape and the factors"):
        optimizer.step()


@pytest.mark.parametrize("change", [replace_state, move_storage, load, shrink, lower, new_options, another_group])
def test_changes_between_steps_are_followed(change):
    """What is remembered from step to step must not outlive what it was about."""
    follow(change)


def test_gradients_that_come_and_go():
    start, grads = random_steps([(6, 5), (7,), (4, 4)], 6)
    results = []
    for fused in (None, False):
        params = parameters(start)
        optimizer = Adafactor(params, lr=0.1, fused=fused)
        for t in range(6):
            for i, (p, g) in enumerate(zip(params, grads[t], strict=True)):
                p.grad = None if (t + i) % 3 == 0 else g
            optimizer.step()
        results.append([p.detach() for p in params])
        assert [int(optimizer.state[p]["step"]) for p in params] == [4, 4, 4]
    for mine, plain in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=4 * 2**-24, atol=1e-7)


# What it leaves to plain PyTorch


def strided(make):
    p = Parameter(make())
    p.grad = torch.ones_like(p)
    return p


LEFT = {
    "a view with gaps": (lambda: strided(lambda: torch.randn(6, 8)[:, ::2]), {}, "do not lie as matrices"),
    "a vector with gaps": (lambda: strided(lambda: torch.randn(12)[::2]), {}, "one behind the other"),
    "channels last, factored over the last dims": (
        lambda: strided(lambda: torch.randn(4, 5, 3, 3).to(memory_format=torch.channels_last)),
        {},
        "do not lie as matrices",
    ),
    "the two largest dims, apart": (
        lambda: strided(lambda: torch.randn(6, 2, 7)),
        {"factor": "largest"},
        "do not lie as matrices",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_it_does_not_support_takes_plain_pytorch_and_says_why(case):
    make, options, reason = LEFT[case]
    p, beside = make(), strided(lambda: torch.randn(4, 4))
    optimizer = Adafactor([p, beside], **options)
    (_, backend, given), (_, other, none) = why(optimizer)
    assert (backend, other, none) == ("reference", "cpu", None)
    assert reason in given
    before = p.detach().clone()
    optimizer.step()
    assert not torch.equal(before, p)
    # and it is not silent where it was asked for.
    with pytest.raises(RuntimeError, match=f"parameter 0 of group 0 should suit the compiled kernel: .*{reason}"):
        Adafactor([make()], **options, fused=True).step()


def test_a_transposed_gradient_takes_plain_pytorch():
    p = Parameter(torch.randn(4, 4))
    p.grad = torch.randn(4, 4).t()
    optimizer = Adafactor([p])
    assert "gradient has strides (1, 4)" in why(optimizer)[0].reason
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="gradient has strides"):
        Adafactor([p], fused=True).step()
    assert torch.equal(p, before)
    optimizer.step()
    assert not torch.equal(p, before)


def test_a_negated_view_takes_plain_pytorch():
    """Its memory holds the opposite of its values."""
    z = torch.randn(1, dtype=torch.complex64)
    p = Parameter(torch.zeros(1))
    p.grad = z.conj().imag
    assert p.grad.is_neg()
    optimizer = Adafactor([p])
    assert "lazy negation" in why(optimizer)[0].reason
    optimizer.step()
    assert float(p.detach()) * float(z.imag) > 0


def test_a_lazy_zero_takes_plain_pytorch():
    """It has no memory at all."""
    p = Parameter(torch.ones(3))
    p.grad = torch._efficientzerotensor((3,))
    optimizer = Adafactor([p])
    assert "lazy" in why(optimizer)[0].reason
    optimizer.step()
    assert p.detach().tolist() == [1, 1, 1]


def test_parameters_in_the_same_memory_take_plain_pytorch():
    """The kernel's threads would race for it. What does not overlap is left to it."""
    buffer = torch.randn(300, 200)
    params = [Parameter(buffer), Parameter(buffer), Parameter(torch.randn(3, 3)), Parameter(buffer[:20])]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = Adafactor(params)
    assert [taken.backend for taken in why(optimizer)] == ["reference", "reference", "cpu", "reference"]
    assert "shares memory" in why(optimizer)[0].reason
    with pytest.raises(RuntimeError, match="shares memory with another parameter"):
        Adafactor(params, fused=True).step()
    optimizer.step()
    halves = torch.randn(4, 6)
    beside = Adafactor([Parameter(halves[:2]), Parameter(halves[2:])])
    assert [taken.backend for taken in why(beside)] == ["cpu", "cpu"]


@pytest.mark.parametrize("shape", [(6, 4), (3, 6, 5), (2, 3, 16, 16)])
def test_stacks_whose_slices_have_gaps_take_plain_pytorch(shape):
    p = strided(lambda: torch.randn(shape).transpose(0, 1))
    optimizer = optax.Adafactor([p], 0.1, batch_dims=1, min_dim_size_to_factor=2)
    assert why(optimizer)[0].backend == "reference"
    optimizer.step()
    with pytest.raises(RuntimeError, match="should suit the compiled kernel"):
        optax.Adafactor([p], 0.1, batch_dims=1, min_dim_size_to_factor=2, fused=True).step()


def test_parameter_subclasses_take_plain_pytorch():
    """They may store something else than what they show."""

    class Own(Parameter):
        pass

    p = Own(torch.ones(3))
    assert why(Adafactor([p]))[0].reason == "it has type Own"


@pytest.mark.parametrize("layout", [TransformersAdafactor, Adafactor])
def test_a_permuted_parameter_has_its_state_in_its_own_order(layout):
    """Else no kernel could go along both. A loaded state is put in that order too."""
    shapes = [(8, 4, 2, 2), (6, 5)]

    def fresh():
        generator = torch.Generator().manual_seed(0)
        conv = torch.randn(shapes[0], generator=generator).to(memory_format=torch.channels_last)
        return [Parameter(conv), Parameter(torch.randn(5, 6, generator=generator).t())]

    options = {"factor": "matrix", "min_dim_size_to_factor": 5}
    results = []
    for fused in (True, False):
        params = fresh()
        optimizer = layout(params, **options, fused=fused)
        for t in range(4):
            if t == 2:
                plain = layout([Parameter(p.detach().contiguous()) for p in params], **options)
                plain.load_state_dict(optimizer.state_dict())
                optimizer.load_state_dict(plain.state_dict())
            for p in params:
                p.grad = (
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
                    .to(p)
                    .as_strided_(p.shape, p.stride())
                )
            optimizer.step()
        results.append([p.detach() for p in params])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4 * 2**-24, atol=1e-7)


# Choosing


def test_the_environment_forces_a_backend(monkeypatch):
    p = strided(lambda: torch.randn(4, 4))
    for name in ("reference", "foreach", "cpu"):
        monkeypatch.setenv("ADAFACTOR_BACKEND", name)
        assert why(Adafactor([p]))[0].backend == name
    monkeypatch.setenv("ADAFACTOR_BACKEND", "gpu")
    with pytest.raises(ValueError, match="ADAFACTOR_BACKEND should be one of reference, foreach, cpu, got 'gpu'"):
        Adafactor([p])
    monkeypatch.setenv("ADAFACTOR_BACKEND", "reference")
    with pytest.raises(ValueError, match="fused=True should agree with ADAFACTOR_BACKEND, got reference"):
        Adafactor([p], fused=True)


@pytest.fixture
def without_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "none.so")
    kernel.library.cache_clear()
    kernel.missing.cache_clear()
    yield
    kernel.library.cache_clear()
    kernel.missing.cache_clear()


@pytest.mark.usefixtures("without_kernel")
def test_without_a_kernel_plain_pytorch_steps_and_fused_says_why(monkeypatch):
    p = strided(lambda: torch.randn(4, 4))
    optimizer = Adafactor([p])
    assert "was not built when adafactor was installed" in why(optimizer)[0].reason
    optimizer.step()
    with pytest.raises(RuntimeError, match="fused=True needs the compiled kernel, and there is none: it was not built"):
        Adafactor([p], fused=True)
    monkeypatch.setenv("ADAFACTOR_BACKEND", "cpu")
    with pytest.raises(RuntimeError, match="ADAFACTOR_BACKEND=cpu needs the compiled kernel"):
        Adafactor([p])


@pytest.mark.parametrize("change", ["another version", "another library"])
def test_a_kernel_of_another_version_is_not_called(change, monkeypatch):
    """Its structs may differ: it would write anywhere."""
    if change == "another version":
        monkeypatch.setattr(kernel, "INTERFACE", kernel.INTERFACE + 1)
    else:
        monkeypatch.setattr(kernel, "LIBRARY", Path(torch._C.__file__))
    kernel.library.cache_clear()
    try:
        with pytest.raises(OSError, match="built for another version"):
            kernel.library()
    finally:
        monkeypatch.undo()
        kernel.library.cache_clear()


def test_the_sweeps_of_the_kernel_are_used():
    """All of the above would pass with plain PyTorch on both sides."""
    assert why(Adafactor(parameters([torch.ones(s) for s in SHAPES])))[0].backend == "cpu"
