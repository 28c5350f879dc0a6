"""Networks with a memory: gradients are those of autograd, the numpy mirror takes the same steps."""

import numpy as np
import pytest
import torch
from torch import nn

from offbeat.models.actions import CategoricalActions
from offbeat.models.flat import FlatParameters
from offbeat.models.recurrent import Recurrent
from offbeat.models.recurrent_actor import NumpyRecurrent
from offbeat.models.team_spec import TeamSpec

NUM_IN, NUM_OUT = 7, 3
SPEC = TeamSpec(2, NUM_IN, 5, CategoricalActions((NUM_OUT,), (0,), ()), hidden=16)
VARIANTS = {
    "plain": {},
    "tanh": {"activation": "tanh"},
    "without norm": {"feature_norm": False},
    "without memory": {"recurrent": False},
    "deep": {"layers": 3},
    "deep, without memory": {"layers": 2, "recurrent": False, "activation": "tanh", "feature_norm": False},
}


def spec_of(**changes):
    fields = {name: getattr(SPEC, name) for name in TeamSpec.__slots__}
    return TeamSpec(**{**fields, **changes})


def make(spec, seed=0, num_in=NUM_IN, num_out=NUM_OUT, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    net = Recurrent(num_in, num_out, spec, generator, last_gain=1.0)
    with torch.no_grad():
        # Trained-looking parameters: norms of 1 and biases of 0 would hide errors.
        for parameter in net.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return net


def data(spec, num_steps, num_columns, seed=0, num_in=NUM_IN, num_out=NUM_OUT, resets=0.2):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_steps, num_columns, num_in, generator=generator)
    memory = 0.5 * torch.randn(num_columns, spec.memory_size, generator=generator)
    breaks = torch.rand(num_steps, num_columns, generator=generator) < resets
    grad = torch.randn(num_steps, num_columns, num_out, generator=generator)
    return inputs, memory, breaks, grad


def reference(net, spec, inputs, memory, resets):
    """The same network from torch's own parts, which autograd can differentiate."""
    act = torch.tanh if spec.activation == "tanh" else torch.relu
    x = inputs
    if spec.feature_norm:
        x = nn.functional.layer_norm(x, x.shape[-1:], net.norm.weight, net.norm.bias)
    for layer in net.before:
        x = act(layer(x))
    memories = memory.new_zeros(*x.shape[:2], 0)
    if spec.recurrent:
        cell = (net.memory.input.weight, net.memory.recurrent.weight)
        biases = (net.memory.input.bias, net.memory.recurrent.bias)
        states = []
        for t in range(len(x)):
            memory = torch.where(resets[t, :, None], torch.zeros_like(memory), memory)
            memory = torch.ops.aten.gru_cell(x[t], memory, *cell, *biases)
            states.append(memory)
        x = memories = torch.stack(states)
    for layer in net.after:
        x = act(layer(x))
    return net.head(x), memories


@pytest.mark.parametrize("shape", [(6, 5), (1, 5), (6, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_autograd(variant, shape):
    spec = spec_of(**VARIANTS[variant])
    net = make(spec).double()
    inputs, memory, resets, grad = (
        part.double() if part.is_floating_point() else part for part in data(spec, *shape)
    )
    if len(resets) > 1:
        resets[1] = False
    parameters = FlatParameters(net)
    trace = net.trace(inputs, memory, resets)
    for _ in range(2):
        net.backward(trace, grad)
    twin = make(spec).double().requires_grad_()
    outputs, memories = reference(twin, spec, inputs, memory, resets)
    outputs.backward(2 * grad)
    torch.testing.assert_close(trace.outputs, outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(trace.memories, memories, rtol=1e-12, atol=1e-12)
    expected = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
    torch.testing.assert_close(parameters.grad, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("num_out", [1, 3, 40])
def test_single_precision_gradients_are_close(num_out):
    spec = spec_of(hidden=64)
    net, twin = make(spec, num_out=num_out), make(spec, num_out=num_out).requires_grad_()
    inputs, memory, resets, grad = data(spec, 10, 32, num_out=num_out)
    parameters = FlatParameters(net)
    net.backward(net.trace(inputs, memory, resets), grad)
    outputs, _ = reference(twin, spec, inputs, memory, resets)
    outputs.backward(grad)
    expected = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
    assert (parameters.grad - expected).norm() < 1e-5 * expected.norm()


def test_steps_that_do_not_count_give_no_gradient():
    """Padding at a chunk's end may hold anything as long as its outputs have no gradient."""
    spec = spec_of()
    inputs, memory, resets, grad = data(spec, 6, 4)
    grad[4:] = 0
    found = []
    for tail in (0.0, 3.0):
        net = make(spec)
        parameters = FlatParameters(net)
        inputs[4:] = tail
        resets[4:] = bool(tail)
        net.backward(net.trace(inputs, memory, resets), grad)
        found.append(parameters.grad)
    torch.testing.assert_close(*found)


def test_a_reset_cuts_memory_and_gradient():
    spec = spec_of()
    inputs, memory, resets, grad = data(spec, 6, 4, resets=0.0)
    resets[3, 1] = True
    net = make(spec)
    parameters = FlatParameters(net)
    whole = net.trace(inputs, memory, resets)
    late = net.trace(inputs[3:], torch.zeros_like(memory), torch.zeros_like(resets[3:]))
    torch.testing.assert_close(whole.outputs[3:, 1], late.outputs[:, 1])
    assert not torch.allclose(whole.outputs[3:, 0], late.outputs[:, 0])
    # Only what comes after the reset is judged, in the column that has it: the steps before must not count.
    grad[:3] = 0
    grad[:, [0, 2, 3]] = 0
    net.backward(whole, grad)
    alone = parameters.grad.clone()
    parameters.grad.zero_()
    net.backward(late, grad[3:])
    torch.testing.assert_close(alone, parameters.grad, rtol=1e-4, atol=1e-5)


def test_what_was_given_stays_as_it_is():
    spec = spec_of()
    net = make(spec)
    FlatParameters(net)
    given = data(spec, 6, 4)
    copies = [part.clone() for part in given]
    inputs, memory, resets, grad = given
    trace = net.trace(inputs, memory, resets)
    kept = trace.outputs.clone(), trace.memories.clone()
    net.backward(trace, grad)
    for left, right in zip(given, copies, strict=True):
        assert torch.equal(left, right)
    assert torch.equal(trace.outputs, kept[0]) and torch.equal(trace.memories, kept[1])


def test_a_memory_that_is_not_finite_is_forgotten_at_a_reset():
    spec = spec_of()
    inputs, memory, resets, _ = data(spec, 4, 3, resets=0.0)
    memory[1] = torch.nan
    resets[0, 1] = True
    outputs, memories = make(spec).forward(inputs, memory, resets)
    assert outputs.isfinite().all() and memories.isfinite().all()


def test_nothing_is_part_of_a_graph():
    net = make(spec_of())
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_initial_weights():
    spec = spec_of(hidden=32, layers=2)
    net = Recurrent(NUM_IN, NUM_OUT, spec, torch.Generator().manual_seed(0), last_gain=0.01)
    torch.testing.assert_close(net.head.weight @ net.head.weight.t(), 1e-4 * torch.eye(NUM_OUT))
    torch.testing.assert_close(net.after[0].weight @ net.after[0].weight.t(), 2 * torch.eye(32))
    for part in (net.memory.input.weight, net.memory.recurrent.weight):
        torch.testing.assert_close(part.t() @ part, torch.eye(32), rtol=0, atol=1e-5)
    assert all(not p.any() for name, p in net.named_parameters() if name.endswith("bias"))
    again = Recurrent(NUM_IN, NUM_OUT, spec, torch.Generator().manual_seed(0), last_gain=0.01)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


# ---------------------------------------------------------------- the numpy mirror


def unroll(actor, inputs, memory, resets):
    outputs, memories = [], []
    for t in range(len(inputs)):
        memory = memory * ~resets[t][:, None]
        out, memory = actor.step(inputs[t], memory)
        outputs.append(out)
        memories.append(memory)
    return np.stack(outputs), np.stack(memories)


def mirror(net, spec):
    actor = NumpyRecurrent(spec)
    actor.load({f"actor.{name}": p.detach().numpy() for name, p in net.named_parameters()}, "actor")
    return actor


@pytest.mark.parametrize("num_columns", [1, 2, 3, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_mirror_stays_with_the_network_for_100_steps(variant, num_columns):
    spec = spec_of(**VARIANTS[variant], hidden=64)
    net = make(spec, noise=0.1, num_in=20, num_out=5)
    with torch.no_grad():
        net.head.weight.mul_(10 / max(1.0, _largest(net, spec)))
    inputs, memory, resets, _ = data(spec, 100, num_columns, num_in=20, resets=0.03)
    with torch.inference_mode():
        outputs, memories = net.forward(inputs, memory, resets)
    assert 1 < outputs.abs().max() < 40
    found, states = unroll(mirror(net, spec), inputs.numpy(), memory.numpy(), resets.numpy())
    np.testing.assert_allclose(found, outputs.numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(states, memories.numpy(), rtol=0, atol=1e-6)
    # Both round in the same places: what differs at all is a rare tie.
    assert np.mean(found != outputs.numpy()) < 1e-3


def _largest(net, spec):
    inputs, memory, resets, _ = data(spec, 10, 64, num_in=20)
    return float(net.forward(inputs, memory, resets)[0].abs().max())


def test_what_is_judged_is_what_is_trained():
    """Judging in double precision changes only the last digits."""
    spec = spec_of(hidden=64)
    net = make(spec, noise=0.1)
    inputs, memory, resets, grad = data(spec, 10, 32)
    trace = net.trace(inputs, memory, resets)
    with torch.inference_mode():
        judged = net.trace(inputs, memory, resets)
    assert judged.outputs.dtype == judged.memories.dtype == torch.float32
    torch.testing.assert_close(judged.outputs, trace.outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(judged.memories, trace.memories, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="no way back"):
        net.backward(judged, grad)


def test_mirror_names_its_prefix():
    spec = spec_of()
    net, other = make(spec, seed=0), make(spec, seed=1)
    weights = {
        f"{prefix}.{name}": p.detach().numpy()
        for prefix, part in (("actor", net), ("critic", other))
        for name, p in part.named_parameters()
    }
    inputs, memory, resets, _ = data(spec, 1, 4, resets=0.0)
    for prefix, part in (("actor", net), ("critic", other)):
        actor = NumpyRecurrent(spec)
        actor.load(weights, prefix)
        found, _ = actor.step(inputs[0].numpy(), memory.numpy())
        np.testing.assert_allclose(found, part.forward(inputs, memory, resets)[0][0].numpy(), atol=1e-6)


def test_mirror_keeps_its_own_weights():
    spec = spec_of()
    net = make(spec)
    weights = {f"actor.{name}": p.detach().numpy().copy() for name, p in net.named_parameters()}
    actor = NumpyRecurrent(spec)
    actor.load(weights, "actor")
    inputs, memory, _, _ = data(spec, 1, 4)
    before = actor.step(inputs[0].numpy(), memory.numpy())
    for array in weights.values():
        array[:] = 0
    after = actor.step(inputs[0].numpy(), memory.numpy())
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left, right)
