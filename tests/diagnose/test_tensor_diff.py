import gc
import inspect
import json
import sys
import weakref

import pytest
import torch
from needs import needs_modes_of_higher_order, needs_saved
from torch import nn
from torch.utils.checkpoint import checkpoint

import memcallback as mc
from memcallback.core.units import round_up
from memcallback.diagnose.tensors.saved import READS_SAVED

KINDS = [pytest.param(False, marks=needs_saved), True]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def network(device="cpu"):
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(8 * 100, 40),
    )
    return nn.Sequential(*layers).to(device)


def images(device="cpu"):
    return torch.randn(16, 3, 10, 10, device=device)


def line():
    """The line that calls this."""
    return inspect.currentframe().f_back.f_lineno


def owners(groups):
    return [owner for group in groups for owner in group.owners]


def the(groups, owner):
    (group,) = (group for group in groups if any(name.startswith(owner) for name in group.owners))
    return group


@pytest.mark.parametrize("device", DEVICES)
def test_what_each_part_of_a_step_brings_and_takes_is_told(device):
    model = network(device)
    optimizer = torch.optim.Adam(model.parameters())
    batch = images(device)
    diff = mc.TensorDiff(model, optimizer)
    diff.mark()
    loss = model(batch).sum()
    forward = diff.mark("forward")
    loss.backward()
    backward = diff.mark("backward")
    optimizer.step()
    step = diff.mark("optimizer step")
    optimizer.zero_grad()
    cleared = diff.mark("zero_grad")
    if READS_SAVED:
        saved = the(forward.appeared, "saved for AddmmBackward0 of 5")
        assert (saved.category, saved.shape, saved.modules) == (
            mc.Category.ACTIVATION,
            (16, 800),
            ("5",),
        )
        assert {name for name in owners(backward.vanished) if "of 5" in name} == {
            "saved for AddmmBackward0 of 5"
        }
    gradients = [group for group in backward.appeared if group.category is mc.Category.GRADIENT]
    assert sum(group.size_bytes for group in gradients) == sum(
        p.numel() * 4 for p in model.parameters()
    )
    weights = the(step.appeared, "exp_avg of 5.weight")
    assert (weights.count, weights.shape, weights.size_bytes) == (2, (40, 800), 2 * 40 * 800 * 4)
    assert weights.owners == ("exp_avg of 5.weight", "exp_avg_sq of 5.weight")
    assert step.vanished == ()
    assert sorted(owners(cleared.vanished)) == sorted(
        f"gradient of {name}" for name, _ in model.named_parameters()
    )
    assert "loss" in owners(forward.appeared)[-1]


@pytest.mark.parametrize("ledger", KINDS)
def test_a_mark_has_the_line_where_it_is(ledger):
    with mc.TensorDiff(ledger=ledger) as diff:
        begun = line() - 1
        kept = torch.ones(1234)
        change = diff.mark("here")
        at = line() - 1
    first, second, third = diff.changes
    assert (first.after.at.number, change.after.at.number, third.after.at.number) == (
        begun,
        at,
        begun,
    )
    assert second is change
    assert change.after.at.path == __file__
    assert change.after.at.function == "test_a_mark_has_the_line_where_it_is"
    assert f"From {first.after.at} to {change.after.at} (here) on CPU, measured" in (
        " ".join(str(change).split())
    )
    assert third.after.label == "end of the block"
    del kept


@pytest.mark.parametrize("device", DEVICES)
def test_the_ledger_tells_operator_module_and_line(device):
    model = network(device)
    with mc.TensorDiff(model, ledger=True) as diff:
        features = model[0](images(device))
        at = line() - 1
        # A storage that no variable names and nothing saved.
        holder = torch._C._nn.gelu(features.detach())[0:1].unbind()
    del holder
    (change,) = diff.changes[1:]
    made = the(change.appeared, "local variable 'features'")
    assert (made.made_at.number, made.made_at.path, made.modules) == (at, __file__, ("0",))


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_pass_has_the_line_that_called_it(device):
    model = network(device)
    loss = model(images(device)).sum()
    with mc.TensorDiff(model, ledger=True) as diff:
        loss.backward()
        at = line() - 1
    assert {
        group.made_at.number
        for group in diff.changes[-1].appeared
        if group.category is mc.Category.GRADIENT
    } == {at}


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values * 2)
        return values**3

    @staticmethod
    def backward(ctx, gradients):
        return gradients * ctx.saved_tensors[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return Cubed.apply(self.linear(nn.functional.dropout(x, 0.1)).sigmoid())


@pytest.mark.cuda
@pytest.mark.parametrize("ledger", KINDS)
@pytest.mark.parametrize("make", [lambda: network("cuda"), lambda: Model().cuda()])
def test_all_that_a_forward_pass_leaves_in_the_allocator_is_attributed(make, ledger):
    model = make()
    batch = (
        images("cuda")
        if isinstance(model, nn.Sequential)
        else torch.randn(8, 32, 64, device="cuda")
    )
    model(batch).sum().backward()  # workspaces
    with mc.TensorDiff(model, ledger=ledger) as diff:
        before = torch.cuda.memory_allocated()
        loss = model(batch).sum()
        allocated = torch.cuda.memory_allocated() - before
        change = diff.mark()
    assert change.vanished == ()
    assert change.after.unattributed_bytes == change.before.unattributed_bytes
    assert change.after.allocated_bytes - change.before.allocated_bytes == allocated
    assert (
        sum(
            group.count * round_up(group.size_bytes // group.count, 512)
            for group in change.appeared
        )
        == allocated
    )
    assert (
        change.after.rounding_bytes - change.before.rounding_bytes
        == allocated - change.appeared_bytes
    )
    assert len(change.appeared) > 3
    del loss


@pytest.mark.cuda
def test_workspaces_are_unattributed():
    features = torch.ones(64, 64, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    diff = mc.TensorDiff(device="cuda")
    diff.mark()
    before = torch.cuda.memory_allocated()
    product = features @ features
    change = diff.mark()
    workspace = torch.cuda.memory_allocated() - before - 64 * 64 * 4
    assert workspace > 1 << 20
    assert change.after.unattributed_bytes - change.before.unattributed_bytes == workspace
    assert (
        f"Unattributed: {mc.format_bytes(change.after.unattributed_bytes)} "
        f"(+{mc.format_bytes(workspace)}), from workspaces" in str(change)
    )
    assert change.after.reserved_bytes == torch.cuda.memory_reserved()
    del product


def test_a_cpu_says_that_its_total_is_of_known_storages():
    values = torch.ones(10)
    diff = mc.TensorDiff(device="cpu")
    change = diff.mark()
    assert change.after.allocated_bytes is None
    assert change.after.unattributed_bytes is None
    assert change.after.known_bytes >= values.nbytes
    assert change.after.resident_bytes > 0
    assert "known storages" in str(change)
    assert "A CPU has no allocator" in str(change)
    assert change.before is None
    assert str(diff) == str(change)


@pytest.mark.parametrize("ledger", KINDS)
def test_another_storage_at_the_same_address_is_another_one(ledger):
    memory = bytearray(1234)
    with mc.TensorDiff(ledger=ledger) as diff:
        values = torch.frombuffer(memory, dtype=torch.uint8)
        address = values.data_ptr()
        diff.mark()
        del values
        values = torch.frombuffer(memory, dtype=torch.uint8)
        change = diff.mark()
    assert values.data_ptr() == address
    here = "local variable 'values'"
    assert the(change.appeared, here).size_bytes == the(change.vanished, here).size_bytes == 1234


@pytest.mark.parametrize("ledger", KINDS)
def test_a_storage_that_is_handed_on_neither_comes_nor_goes(ledger):
    with mc.TensorDiff(ledger=ledger) as diff:
        values = torch.ones(1234)
        diff.mark()
        renamed = values[:5]
        del values
        change = diff.mark()
    assert (change.appeared, change.vanished) == ((), ())
    assert "nothing appeared, nothing vanished" in str(change)
    del renamed


def test_a_storage_of_another_size_came_and_went():
    values = torch.ones(1234)
    diff = mc.TensorDiff()
    diff.mark()
    values.untyped_storage().resize_(9000)
    change = diff.mark()
    assert (the(change.vanished, "local").size_bytes, the(change.appeared, "local").size_bytes) == (
        1234 * 4,
        9000,
    )


def test_compiled_code_runs_as_compiled():
    compiled = torch.compile(
        lambda values: torch.compiler.is_compiling(), backend="eager", fullgraph=True
    )
    assert compiled(torch.ones(3))
    with mc.TensorDiff(ledger=True):
        assert compiled(torch.ones(4))


@needs_modes_of_higher_order
def test_operators_of_higher_order_go_through_the_ledger():
    values = torch.ones(1234)
    with mc.TensorDiff(ledger=True) as diff:
        result = torch.cond(torch.tensor(True), torch.exp, torch.sin, (values,))
        at = line() - 1
    assert the(diff.changes[-1].appeared, "local variable 'result'").made_at.number == at
    assert torch.equal(result, values.exp())


def test_losses_that_are_kept_are_found():
    model, losses = nn.Linear(10, 1), []
    diff = mc.TensorDiff(model)
    diff.mark()
    for _ in range(3):
        loss = model(torch.ones(1234, 10))
        losses.append(loss)
    kept = the(diff.mark().appeared, "local variable 'losses'")
    assert (kept.count, kept.shape, kept.size_bytes) == (3, (1234, 1), 3 * 1234 * 4)
    assert kept.owners == (
        "local variable 'losses' in test_losses_that_are_kept_are_found() of test_tensor_diff.py",
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ledger", KINDS)
def test_a_checkpoint_is_not_computed_again(device, ledger):
    model, calls = network(device), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with mc.TensorDiff(model, ledger=ledger) as diff:
        loss = checkpoint(model, images(device).requires_grad_(), use_reentrant=False).sum()
        change = diff.mark()
        assert len(calls) == 1
        loss.backward()
    assert len(calls) == 2
    assert not [name for name in owners(change.appeared) if "AddmmBackward0" in name]
    assert "gradient of 5.weight" in owners(diff.changes[-1].appeared)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ledger", KINDS)
def test_nothing_is_kept_alive(device, ledger):
    gc.collect()
    gc.disable()
    try:
        model = network(device)
        optimizer = torch.optim.Adam(model.parameters())
        references = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
        with mc.TensorDiff(model, optimizer, ledger=ledger) as diff:
            output = model(images(device))
            references.append(weakref.ref(output.untyped_storage()))
            if READS_SAVED:
                references.append(
                    weakref.ref(output.grad_fn._raw_saved_mat1.data.untyped_storage())
                )
            diff.mark()
            output.sum().backward()
            optimizer.step()
            references += [
                weakref.ref(state["exp_avg"].untyped_storage())
                for state in optimizer.state.values()
            ]
            diff.mark()
            del output
            optimizer.zero_grad()
            del model, optimizer
        gc.collect()  # PyTorch's own modules and optimizers are in cycles
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ledger", KINDS)
def test_what_an_operator_made_is_gone_when_the_program_drops_it(device, ledger):
    gc.disable()
    try:
        with mc.TensorDiff(ledger=ledger, device=device) as diff:
            values = torch.ones(1234, device=device)
            doubled = values * 2
            reference = weakref.ref(doubled.untyped_storage())
            diff.mark()
            del doubled
            assert reference() is None
    finally:
        gc.enable()


def train(watch, device):
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    diff = watch(model, optimizer)
    for _ in range(2):
        with diff:
            optimizer.zero_grad()
            loss = model(images(device)).square().mean()
            diff.mark()
            loss.backward()
            diff.mark()
            optimizer.step()
        losses.append(loss.detach())
    return [
        *losses,
        *model.state_dict().values(),
        torch.get_rng_state(),
        *(p.grad for p in model.parameters()),
    ]


class Nothing:
    def __init__(self, *_):
        pass

    def mark(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ledger", [False, True])
def test_training_is_the_same_to_the_bit(device, ledger):
    plain = train(Nothing, device)
    watched = train(lambda model, optimizer: mc.TensorDiff(model, optimizer, ledger=ledger), device)
    assert len(plain) == len(watched) > 10
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def test_after_a_block_nothing_is_left_of_it():
    model = network()
    with mc.TensorDiff(model, ledger=True):
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_error_in_the_block_goes_on_and_nothing_is_left_of_it():
    model = network()
    diff = mc.TensorDiff(model, ledger=True)
    with pytest.raises(ZeroDivisionError), diff:
        1 / 0  # noqa: B018
    assert torch._C._len_torch_dispatch_stack() == 0
    assert len(diff.changes) == 2
    with diff:  # and again
        pass
    assert len(diff.changes) == 4


def test_a_block_inside_itself_is_refused():
    with (
        mc.TensorDiff() as diff,
        pytest.raises(RuntimeError, match=r"in a `with` block already\. Create another one"),
    ):
        diff.__enter__()


def test_one_inside_another_sees_the_same():
    with mc.TensorDiff(ledger=True) as outer:
        with mc.TensorDiff(ledger=True) as inner:
            values = torch.ones(1234)
        del values
    assert the(inner.changes[-1].appeared, "local variable 'values'").size_bytes == 1234 * 4
    assert not [name for name in owners(outer.changes[-1].appeared) if "'values'" in name]


def test_a_ledger_needs_a_block():
    with pytest.raises(RuntimeError, match=r"outside of `with diff:`, .* or leave out ledger=True"):
        mc.TensorDiff(ledger=True).mark()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"model": "network"},
            r"model must be a torch.nn.Module or several of them, got 'network'\. Leave it out",
        ),
        ({"model": [nn.Linear(1, 1), 3]}, r"model must be .*, got 3\."),
        ({"model": nn.Linear}, r"model must be .*, got the class Linear\."),
        (
            {"optimizer": nn.Linear(1, 1)},
            r"optimizer must be a torch.optim.Optimizer or several of them, got a Linear\.",
        ),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        mc.TensorDiff(**arguments)


def test_a_label_is_a_text():
    with pytest.raises(
        TypeError, match=r"label must be a string, got 5\. Write mark\('after forward'\)"
    ):
        mc.TensorDiff().mark(5)


def test_several_models_and_optimizers_are_taken():
    models = [nn.Linear(1234, 1), nn.Bilinear(1234, 2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    diff = mc.TensorDiff(models, optimizers)
    diff.mark()
    models[0](torch.ones(2, 1234)).sum().backward()
    optimizers[0].step()
    assert "momentum_buffer of weight of Linear" in owners(diff.mark().appeared)


def test_the_data_are_json_with_the_unit_in_each_key():
    model = network()
    diff = mc.TensorDiff(model)
    diff.mark()
    output = model(images())
    diff.mark("forward | here")
    read = json.loads(json.dumps(diff.to_dict()))
    first, second = read["changes"]
    assert first["before"] is None
    assert second["before"] == first["after"]
    assert second["appeared_bytes"] == sum(group["size_bytes"] for group in second["appeared"])
    assert second["appeared"][0]["category"] in {"activation", None}
    assert second["after"]["at"]["line"] > 0
    assert second["after"]["label"] == "forward | here"
    del output


def test_markdown_has_the_rows_of_the_table():
    diff = mc.TensorDiff()
    diff.mark()
    values = [torch.ones(1234) for _ in range(7)]
    text = diff.mark().to_markdown()
    assert "| + | 7 x | (1234,) | float32 | 33.74 KiB |  | local variable 'values' in" in text
    assert diff.to_markdown() == text
    del values


def test_small_groups_are_summed_up():
    diff = mc.TensorDiff()
    diff.mark()
    values = [torch.ones(number) for number in range(100, 130)]
    change = diff.mark()
    assert len(change.appeared) == 30
    # The 20 largest have 110 to 129 elements each.
    (row,) = (row for row in str(change).splitlines() if "smaller groups" in row)
    assert row.split() == [
        "+",
        "10",
        "x",
        *mc.format_bytes(sum(range(100, 110)) * 4).split(),
        "10",
        "smaller",
        "groups",
    ]
    del values


def test_the_locals_of_a_function_are_free_after_a_mark():
    def function():
        values = torch.ones(1234)
        reference = weakref.ref(values.untyped_storage())
        mc.TensorDiff().mark()
        del values
        return reference() is None

    assert sys.gettrace() is not None or function()


def test_a_model_can_be_saved_while_the_ledger_is_on(tmp_path):
    model = network()
    with mc.TensorDiff(model, ledger=True):
        torch.save(model, tmp_path / "model.pt")
    assert isinstance(torch.load(tmp_path / "model.pt", weights_only=False), nn.Module)
