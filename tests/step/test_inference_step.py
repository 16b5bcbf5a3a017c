"""What InferenceStep takes, refuses and leaves alone."""

import pytest
import torch
from torch import nn

import memcallback as mc


def model_and_batch():
    return nn.Linear(8, 4), torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mode": "eval"}, ValueError, r"mode 'eval' is not known. Use one of 'inference_mode'"),
        ({"keep_outputs": "some"}, ValueError, r"keep_outputs 'some' is not known. Use one of"),
        ({"num_batches": 0}, ValueError, r"num_batches must be at least 1, got 0"),
        ({"precision": "8"}, ValueError, r"precision '8' is not known"),
        ({"forward": 3}, TypeError, r"forward must be a function of the model and the batch, got"),
        ({"forward": lambda model: model}, TypeError, r"cannot be called with the model and the"),
        ({"generate": {"max_new_tokens": 4}}, TypeError, r"a Linear, which has no generate\(\)"),
        ({"frees_gradients": "no"}, TypeError, r"must be True or False, got 'no'"),
        ({"after": 3}, TypeError, r"after must be a TrainingStep, got 3"),
        (
            {"after": mc.TrainingStep(*model_and_batch())},
            ValueError,
            r"after=... trains a Linear, but this step runs another model, a Linear",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(options, error, text):
    model, batch = model_and_batch()
    with pytest.raises(error, match=text):
        mc.InferenceStep(model, batch, **options)


def test_a_generation_says_how_many_tokens_it_makes():
    class Generates(nn.Linear):
        def generate(self, **options):
            """Nothing."""

    with pytest.raises(TypeError, match=r"max_new_tokens must be a whole number, got None. Give"):
        mc.InferenceStep(Generates(8, 4), torch.zeros(3, 8), generate={"num_beams": 2})
    with pytest.raises(ValueError, match=r"forward .* and generate are two ways to run the model"):
        mc.InferenceStep(
            Generates(8, 4),
            torch.zeros(3, 8),
            forward=lambda model, batch: batch,
            generate={"max_new_tokens": 2},
        )


def test_a_module_without_the_stage_is_refused():
    with pytest.raises(TypeError, match=r"a LightningModule with a test_step, got a Linear"):
        mc.InferenceStep.from_lightning(*model_and_batch(), stage="test")
    with pytest.raises(ValueError, match=r"stage 'fit' is not known. Use one of validate, test"):
        mc.InferenceStep.from_lightning(*model_and_batch(), stage="fit")


def test_savings_are_for_training_alone():
    with pytest.raises(TypeError, match=r"step must be a TrainingStep, got an InferenceStep"):
        mc.what_if(mc.InferenceStep(*model_and_batch()), device="24GiB")


def test_a_batch_without_a_size_is_asked_for_one():
    with pytest.raises(mc.PredictionError, match=r"Give it: batch_size=32 to InferenceStep"):
        mc.predict(mc.InferenceStep(nn.Linear(8, 4), 3), device="24GiB", isolate=False)


def test_a_prediction_leaves_the_model_and_the_random_numbers_alone():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    training = mc.TrainingStep(model, torch.zeros(3, 8), optimizer=torch.optim.Adam)
    mc.predict(
        mc.InferenceStep(model, torch.zeros(5, 8), after=training), device="24GiB", isolate=False
    )
    assert [part.training for part in model] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_tokenizer_s_batch_is_generated_from_as_a_dict_is():
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1, n_head=1, n_embd=16, vocab_size=50, bos_token_id=1, eos_token_id=1
        )
    )
    prompt = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4)}

    def peak(batch):
        generate = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        step = mc.InferenceStep(model.eval(), batch, generate=generate)
        return mc.predict(step, device="H200", isolate=False).peak_allocated_bytes

    # A BatchEncoding is a mapping and no dict.
    assert peak(transformers.BatchEncoding(prompt)) == peak(prompt)


def test_a_prediction_leaves_the_variables_of_the_training_before_alone():
    model, batch = model_and_batch()
    losses = []

    def loss(model, batch):
        losses.append(model(batch).sum())
        return losses[-1]

    training = mc.TrainingStep(model, batch, loss=loss)
    mc.predict(mc.InferenceStep(model, batch, after=training), device="H200", isolate=False)
    assert not losses
