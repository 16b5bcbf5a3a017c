"""Which values a trace knows: the batch's, those of the host, constants; not the device's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memcallback as mc
from memcallback.core.allocation_trace import phase_events
from memcallback.core.units import MiB

CARD = "L4"
LENGTHS = torch.tensor([3, 9, 5, 7])


class Sized(nn.Module):
    """Puts out a tensor of so many rows as a program reads from a value."""

    def __init__(self, rows_of):
        super().__init__()
        self.net, self.rows_of = nn.Linear(256, 256), rows_of

    def forward(self, *batch):
        rows = self.rows_of(self, *batch)
        return self.net(self.net.weight.new_zeros(rows, 256)).square().mean()


def num_rows(rows_of, batch=LENGTHS, **options):
    """How many rows the steps made, and the prediction."""
    step = mc.TrainingStep(Sized(rows_of), batch, loss=lambda model, batch: model(batch), **options)
    prediction = mc.predict(step, device=CARD)
    sizes = {
        event.size_bytes // (4 * 256)
        for event in prediction.trace.traced.trace.events
        if getattr(event, "operator", "") == "aten::new_zeros"
    }
    return sizes, prediction


def drawn(model, lengths):
    return int(torch.empty(1).uniform_(50.0, 60.0).item())


READINGS = {
    "maximum": (lambda model, lengths: int(lengths.max()), 9),
    "sum of a part": (lambda model, lengths: lengths[1:].sum().item(), 21),
    "list": (lambda model, lengths: sum(lengths.tolist()), 24),
    "view that was written to": (
        lambda model, lengths: (lengths.clone()[:2].add_(10)[0] + lengths[3]).item(),
        20,
    ),
    "condition": (lambda model, lengths: 5 if (lengths > 2).all() else 6, 5),
    "condition that fails": (lambda model, lengths: 5 if (lengths > 3).all() else 6, 6),
    "constant": (lambda model, lengths: int(torch.tensor([2.5, 4.5]).sum()), 7),
    "constant on the device": (
        lambda model, lengths: int(torch.full((3,), 2.0, device=lengths.device).sum()),
        6,
    ),
    "repeated": (
        lambda model, lengths: len(torch.repeat_interleave(lengths, lengths - 2)),
        1 + 7 + 3 + 5,
    ),
    "counted": (lambda model, lengths: len(torch.bincount(lengths)), 10),
    "several at once": (
        lambda model, lengths: int(torch._foreach_add([lengths, lengths[:2]], 1)[0].max()),
        10,
    ),
    "several in place": (
        lambda model, lengths: (
            [counts := [lengths.clone(), lengths[:1].clone()], torch._foreach_add_(counts, 2)]
            and int(counts[1])
        ),
        5,
    ),
    "number counted up": (lambda model, lengths: int(torch.tensor(1).add_(1)), 2),
    "constant counted up": (
        lambda model, lengths: (
            (counts := torch.tensor([1, 2, 3], device=lengths.device)).add_(1)[1:].add_(1)
            is not None
            and int(counts.sum())
        ),
        2 + 4 + 5,
    ),
    "part of a constant": (
        lambda model, lengths: (y := torch.tensor([1, 2]))[0].add_(5) is not None and int(y.sum()),
        8,
    ),
    "filled": (
        lambda model, lengths: int(torch.empty(3, dtype=torch.int64).fill_(4).sum()),
        12,
    ),
    "written by way of NumPy": (
        lambda model, lengths: (x := torch.ones(3)).numpy().fill(5) is None and int(x.sum()),
        15,
    ),
    "counted on the host": (lambda model, lengths: int(torch.arange(4).cumsum(0)[-1]), 6),
}


@pytest.mark.parametrize("name", READINGS)
def test_values_of_batch_host_and_constants_are_read(name):
    rows_of, expected = READINGS[name]
    rows, prediction = num_rows(rows_of)
    assert rows == {expected}
    assert not any("reads a value" in caveat for caveat in prediction.caveats)


def test_a_number_that_the_host_draws_is_drawn():
    torch.manual_seed(0)
    rows, _ = num_rows(drawn)
    assert rows <= {*range(50, 61)}
    torch.manual_seed(0)
    assert num_rows(drawn)[0] == rows


def test_a_loop_on_a_drawn_number_ends():
    def rows_of(model, lengths):
        count = 1
        while torch.rand(()).item() < 0.5:
            count += 1
        return count

    assert min(num_rows(rows_of)[0]) >= 1


def test_what_the_device_has_computed_is_not_known():
    def rows_of(model, lengths):
        values = lengths.to(torch.float32) * model.net.weight.sum()
        return 3 + int(values.max())

    rows, prediction = num_rows(rows_of)
    assert rows == {3}
    assert any("reads a value" in caveat for caveat in prediction.caveats)


def test_known_values_that_unknown_ones_overwrite_are_not_known():
    def rows_of(model, lengths):
        known = torch.full((4,), 9.0, device=lengths.device)
        part = known[1:]
        part.copy_(model.net.weight[0, :3].detach())
        return 3 + int(known.max())

    rows, prediction = num_rows(rows_of)
    assert rows == {3}
    assert any("reads a value" in caveat for caveat in prediction.caveats)


def test_a_larger_batch_repeats_the_samples():
    _, prediction = num_rows(lambda model, lengths: len(lengths) * int(lengths.max()))
    whole = mc.predict(
        mc.TrainingStep(
            Sized(lambda model, lengths: len(lengths) * int(lengths.max())),
            LENGTHS.repeat(4),
            loss=lambda model, batch: model(batch),
        ),
        device=CARD,
    )
    assert prediction.at(16).peak_allocated_bytes == whole.peak_allocated_bytes


def test_memory_that_is_not_written_and_data_that_is_exchanged_are_not_known():
    def empty(model, lengths):
        return 3 + int(torch.empty(3, dtype=torch.int64).max())

    def exchanged(model, lengths):
        known = torch.zeros(3)
        known.data = model.net.weight[0, :3].detach().cpu()
        return 3 + int(known.sum())

    for rows_of in (empty, exchanged):
        rows, prediction = num_rows(rows_of)
        assert max(rows) <= 4
        assert any("reads a value" in caveat for caveat in prediction.caveats)


def test_a_generator_of_the_users_is_as_it_was():
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()

    def rows_of(model, lengths):
        return 1 + int(10 * torch.rand(1, generator=generator))

    step = mc.TrainingStep(Sized(rows_of), LENGTHS, loss=lambda model, batch: model(batch))
    mc.predict(step, device=CARD, isolate=False)
    assert torch.equal(generator.get_state(), before)


class Counting(nn.Module):
    """Takes much memory in one of the batches of an update, as a buffer on the host counts them."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, batch):
        self.count += 1
        out = self.net(batch)
        if int(self.count) % 8 == 6:
            out = out + out.new_zeros(50_000_000)[:1]
        return out.sum()


def test_batches_of_an_update_in_which_values_differ_are_all_run():
    step = mc.TrainingStep(
        Counting(), torch.ones(4, 64), loss=lambda model, batch: model(batch), accumulate=8
    )
    peaks = [one.peak_allocated_bytes for one in mc.predict(step, device=CARD).steps]
    assert max(peaks) > 200_000_000 > min(peaks)


def test_values_of_a_large_batch_are_not_read():
    tokens = torch.ones(8, 200_000, dtype=torch.long)
    rows, prediction = num_rows(lambda model, tokens: 3 + int(tokens.max()), tokens)
    assert rows == {3}
    assert any("reads a value" in caveat for caveat in prediction.caveats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_weights_are_not_all_zero(dtype):
    # As prodigyopt asks, which keeps a copy of each parameter that is not all zero.
    rows, _ = num_rows(lambda model, _: 3 if model.net.weight.to(dtype).any() else 40)
    assert rows == {3}
    rows, _ = num_rows(lambda model, _: 3 if model.net.weight.isnan().any() else 40)
    assert rows == {40}


def test_a_mask_is_known_at_a_batch_size_far_above_its_own():
    mask = torch.ones(8, 256, dtype=torch.bool)

    def rows_of(model, mask):
        return 3 if mask.logical_not().any() else 40

    step = mc.TrainingStep(Sized(rows_of), mask, loss=lambda model, batch: model(batch))
    small = mc.predict(step, device=CARD)
    large = mc.predict(step, device=CARD, batch_size=2048)
    assert small.at(2048).step == large.step
    assert not any("reads a value" in caveat for caveat in large.caveats)


def test_the_users_batch_is_as_it_was():
    batch = LENGTHS.clone()

    def rows_of(model, lengths):
        return int(lengths.add_(5).max())

    step = mc.TrainingStep(Sized(rows_of), batch, loss=lambda model, batch: model(batch))
    mc.predict(step, device=CARD, isolate=False)
    assert torch.equal(batch, LENGTHS)


def test_a_count_of_steps_that_a_hook_keeps_is_counted():
    """An optimizer in the backward pass, with state already there."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8))
        optimizers = {
            parameter: torch.optim.Adam([parameter], foreach=False)
            for parameter in model.parameters()
        }

        def update(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return model

    def loss(model, batch):
        return model(batch).square().mean()

    batch = torch.ones(16, 64)
    fresh, used = make(), make()
    for _ in range(2):
        loss(used, batch).backward()
    peaks = [
        mc.predict(mc.TrainingStep(model, batch, loss=loss), device=CARD).step.peak_allocated_bytes
        for model in (fresh, used)
    ]
    assert peaks[0] == peaks[1]


def test_a_mask_of_ones_is_left_out_as_the_model_leaves_it_out():
    """As transformers decides: with padding attention gets a mask, without it none."""

    def loss(model, batch):
        mask = None if batch["mask"].all() else batch["mask"][:, None, None, :].bool()
        states = model(batch["states"]).unflatten(-1, (4, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(states, states, states, mask).square().mean()

    def peak(mask):
        batch = {"states": torch.ones(4, 128, 64), "mask": mask}
        step = mc.TrainingStep(nn.Linear(64, 64), batch, loss=loss)
        return mc.predict(step, device=CARD).peak_allocated_bytes

    whole, padded = torch.ones(4, 128, dtype=torch.long), torch.ones(4, 128, dtype=torch.long)
    padded[0, 100:] = 0
    assert peak(whole) < peak(padded)


def test_the_mask_of_a_transformers_model_is_read_and_said():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
        max_position_embeddings=2048,
    )
    model = transformers.BertForSequenceClassification(config)

    def predicted(mask):
        tokens = torch.zeros_like(mask)
        batch = {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": torch.zeros(len(mask), dtype=torch.long),
        }
        prediction = mc.predict(mc.TrainingStep(model, batch), device="H100")
        (said,) = [caveat for caveat in prediction.caveats if "mask" in caveat] or [""]
        return prediction.peak_allocated_bytes, said

    whole, padded = torch.ones(4, 256, dtype=torch.long), torch.ones(4, 256, dtype=torch.long)
    padded[1, 50:] = 0
    least, said_of_whole = predicted(whole)
    most, said_of_padded = predicted(padded)
    assert least < most
    assert "a batch with padding needs more" in said_of_whole
    assert said_of_padded == ""
    _, said_of_large = predicted(torch.ones(1024, 2048, dtype=torch.long))
    assert "A mask with padding was assumed" in said_of_large


@pytest.mark.parametrize("device", ["NVIDIA L4", "cpu"])
def test_numbers_that_stand_in_a_list_as_tensors_are_read(device):
    def loss(model, batch):
        inputs, numbers = batch
        unknown = torch.tensor([inputs.max(), 2, inputs.min()], device=inputs.device)
        known = torch.tensor([numbers.max() + 1, 3], device=inputs.device)
        assert (unknown.dtype, known.dtype) == (torch.float32, torch.int64)
        assert unknown.shape == (3,)
        rows = torch.ones(int(known[0]), 64, device=inputs.device)
        return model(torch.cat([inputs, rows])).sum() + unknown.sum()

    step = mc.TrainingStep(
        nn.Linear(64, 64),
        (torch.randn(8, 64), torch.arange(1000, 1008)),
        loss=loss,
        optimizer=torch.optim.SGD,
    )
    prediction = mc.predict(step, device=device, isolate=False)
    assert prediction.peak_allocated_bytes > 3 * 1016 * 64 * 4


def test_a_batch_of_any_size_takes_no_memory_of_the_host():
    step = mc.TrainingStep(
        nn.Embedding(10, 2), torch.arange(8), loss=lambda model, batch: model(batch).sum()
    )
    assert mc.predict(step, device=CARD, batch_size=1 << 31).peak_allocated_bytes > 1 << 34


def test_a_step_that_generates_does_so_to_the_end_and_that_is_said():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=50,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )

    def loss(model, prompt):
        with torch.no_grad():
            tokens = model.generate(input_ids=prompt, max_new_tokens=3)
        assert tokens.shape == (len(prompt), 7)
        return model(input_ids=tokens, labels=tokens).loss

    step = mc.TrainingStep(transformers.LlamaForCausalLM(config), torch.full((2, 4), 5), loss=loss)
    caveats = mc.predict(step, device=CARD).caveats
    assert any("generated up to its largest length" in caveat for caveat in caveats)


def ctc(lengths, times=50):
    """A step with a CTC loss of texts of these lengths, with room for 20 letters."""

    def loss(model, batch):
        targets = torch.ones(len(batch), 20, dtype=torch.int64, device=batch.device)
        scores = model(batch).log_softmax(-1).transpose(0, 1)
        of_targets = lengths(model, batch)
        of_inputs = torch.full((len(batch),), times)
        if isinstance(of_targets, list):
            of_inputs = of_inputs.tolist()
        return F.ctc_loss(scores, targets, of_inputs, of_targets)

    return mc.TrainingStep(nn.Linear(8, 40), torch.zeros(4, times, 8), loss=loss)


def table_bytes(prediction):
    """The largest tensor that the loss itself makes: a table of its targets at each time."""
    return max(
        event.size_bytes
        for event in prediction.trace.traced.trace.events
        if getattr(event, "operator", "") == "aten::new_empty"
    )


CTC_LENGTHS = {
    "list": lambda model, batch: [6, 9, 5, 7, 8][: len(batch)],
    "tensor on the host": lambda model, batch: torch.tensor([6, 9, 5, 7, 8][: len(batch)]),
    "tensor on the device": lambda model, batch: torch.full((len(batch),), 9, device=batch.device),
}


@pytest.mark.parametrize("device", [CARD, "cpu"])
@pytest.mark.parametrize("name", CTC_LENGTHS)
def test_the_table_of_a_ctc_loss_is_as_long_as_the_longest_known_target(name, device):
    prediction = mc.predict(ctc(CTC_LENGTHS[name]), device=device)
    assert table_bytes(prediction) == 4 * 50 * (2 * 9 + 1) * 4
    assert not any("CTC" in caveat for caveat in prediction.caveats)


def test_targets_of_a_ctc_loss_whose_lengths_are_unknown_fill_their_tensor_and_that_is_said():
    def lengths(model, batch):
        return model.weight.sum(1)[: len(batch)].to(torch.int64)

    prediction = mc.predict(ctc(lengths), device=CARD)
    assert table_bytes(prediction) == 4 * 50 * (2 * 20 + 1) * 4
    assert any("CTC loss have unknown lengths" in caveat for caveat in prediction.caveats)


def test_a_long_ctc_loss_is_known_at_batch_sizes_at_which_its_kernel_does_more():
    def lengths(model, batch):
        return torch.full((len(batch),), 9)

    small, large = (
        mc.predict(ctc(lengths, times=200), device=CARD, batch_size=size) for size in (4, 64)
    )
    assert small.at(64).step == large.step


def margin_of_the_right_class(model, batch):
    """The scores of the right classes, by a mask, in a column: one for each sample."""
    samples, classes = batch
    scores = model(samples)
    is_right = torch.zeros_like(scores)
    is_right[torch.arange(len(scores), device=scores.device), classes] = 1
    right = scores[is_right == 1]
    return F.cross_entropy(scores - is_right * (0.1 * right.exp()).unsqueeze(1), classes)


@pytest.mark.parametrize("num_classes", [10, 5000])
def test_code_that_counts_on_the_true_shape_gets_that_of_the_known_values(num_classes):
    model, batch = nn.Linear(16, num_classes), (torch.zeros(32, 16), torch.arange(32) % 10)
    step = mc.TrainingStep(model, batch, loss=margin_of_the_right_class)
    prediction = mc.predict(step, device=CARD)
    text = "aten::index has a shape that depends on values: that of this batch was taken."
    assert text in " ".join(prediction.caveats)
    assert "largest possible" not in " ".join(prediction.caveats)
    again = mc.TrainingStep(
        model,
        (torch.zeros(64, 16), torch.arange(64) % 10),
        loss=margin_of_the_right_class,
    )
    expected = mc.predict(again, device=CARD).peak_allocated_bytes
    assert prediction.at(64).peak_allocated_bytes == expected


def test_code_that_fails_on_any_shape_says_so_with_the_largest():
    def fails(model, batch):
        samples, classes = batch
        return model(samples)[classes == 0].view(-1, 7).sum()

    batch = torch.zeros(32, 16), torch.arange(32) % 10
    step = mc.TrainingStep(nn.Linear(16, 10), batch, loss=fails)
    with pytest.raises(
        mc.PredictionError,
        match=r"invalid for input of size 320\. The shape of aten::index depends on values, so "
        r"before this error the largest possible was assumed\. If .*, leave that code out",
    ):
        mc.predict(step, device=CARD)


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor])
@pytest.mark.parametrize(("kind", "dtype"), [("int64", None), ("int32", torch.int64)])
@pytest.mark.parametrize("is_named", [False, True])
def test_an_array_becomes_one_tensor_on_the_device(make, kind, dtype, is_named):
    array = pytest.importorskip("numpy").full(300, 2, dtype=kind)

    def loss(model, batch):
        data = {"data": array} if is_named else {}
        made = make(*(() if is_named else (array,)), **data, dtype=dtype, device=batch.device)
        more = torch.zeros(int(made.sum()), 8, device=batch.device)  # its values are known
        return model(batch).sum() + 0 * more.sum()

    step = mc.TrainingStep(nn.Linear(8, 8), torch.zeros(4, 8), loss=loss)
    prediction = mc.predict(step, device=CARD)
    events = prediction.trace.at(4).events
    *_, forward = phase_events(events, mc.Phase.FORWARD)
    # PyTorch 2.6 also takes a workspace of 1 MiB for the product.
    sizes = [getattr(event, "size_bytes", 0) for event in forward]
    assert [size for size in sizes if 1200 <= size < MiB] == [300 * 8, 600 * 8 * 4]


def test_a_tensor_of_an_array_can_have_a_gradient():
    array = pytest.importorskip("numpy").ones((4, 8), dtype="float32")

    def loss(model, batch):
        offset = torch.tensor(array, device=batch.device, requires_grad=True)
        model(batch + offset).sum().backward()
        return model(batch).sum() + 0 * offset.grad.sum()

    step = mc.TrainingStep(nn.Linear(8, 8), torch.zeros(4, 8), loss=loss)
    assert mc.predict(step, device=CARD).peak_allocated_bytes


def test_all_operators_are_named_that_got_the_largest_possible_shape():
    def fails(model, batch):
        samples, classes = batch
        return (classes.nonzero().sum() + model(samples)[classes == 0].view(-1, 7)).sum()

    batch = torch.zeros(32, 16), torch.arange(32) % 10
    step = mc.TrainingStep(nn.Linear(16, 10), batch, loss=fails)
    with pytest.raises(mc.PredictionError, match=r"The shape of aten::nonzero and aten::index "):
        mc.predict(step, device=CARD)
