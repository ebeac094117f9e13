"""QATCallback in the Trainer: prepared before the optimizer, resumed to the bit, taught, refused with a reason."""

import json

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CheckpointError, ConfigError
from tests.support.bits import assert_same_bits
from tests.support.vision import import_torchvision

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
import_torchvision()

import transformers  # noqa: E402

from fakequant.integrations.transformers import QATCallback  # noqa: E402
from fakequant.model.training.distillation import labels_of_outputs  # noqa: E402

LEARNED, FIXED, EPOCH = fq.qat.Scales.LEARNED, fq.qat.Scales.FIXED, fq.qat.Scales.EPOCH
IDS = torch.randint(0, 20, (32, 6), generator=torch.Generator().manual_seed(0))
FEW_BITS = fq.Config("W2A2", (fq.Rule("bert.encoder*", input="int2", weight="int2 per_channel(0)"),))
SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
LABELED = [{"input_ids": row, "labels": place % 2} for place, row in enumerate(IDS)]
TEXT = [{"input_ids": row, "labels": row} for row in IDS]
CALIBRATION = [{"input_ids": IDS[:8]}]


def classifier(dropout=0.1):
    torch.manual_seed(0)
    off = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "initializer_range": 0.5}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **off))


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )


def decoder():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, pad_token_id=0))


def adapted():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(classifier(), peft.LoraConfig(r=2, target_modules=["query", "dense"]))


class Stop(transformers.TrainerCallback):
    """Ends a run as a signal would, in the middle of a step."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer(folder, model, callbacks, data=LABELED, cls=transformers.Trainer, **settings):
    settings = {"max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "save_steps": 3, **settings}
    arguments = transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, **settings
    )
    return cls(model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)


def losses(one):
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("make", "data", "settings", "arguments"),
    [
        (classifier, LABELED, {"scales": FIXED}, {}),
        (classifier, LABELED, {"scales": LEARNED, "teacher": "float"}, {}),
        (classifier, LABELED, {"scales": LEARNED, "learn_after": 0.5, "method": "tqt"}, {"weight_decay": 0.1}),
        (classifier, LABELED, {"scales": EPOCH}, {"per_device_train_batch_size": 16}),
        (classifier, LABELED, {"scales": EPOCH}, {"per_device_train_batch_size": 16, "save_steps": 4}),
        (decoder, TEXT, {"scales": LEARNED, "teacher": "self"}, {"gradient_accumulation_steps": 2}),
        (decoder, TEXT, {"scales": LEARNED, "teacher": "float"}, {"bf16": True}),
        (adapted, LABELED, {"scales": LEARNED, "teacher": "float"}, {"learning_rate": 0.01}),
    ],
    ids=[
        "fixed",
        "learned, taught",
        "learned late",
        "each epoch",
        "between epochs",
        "accumulated",
        "bfloat16",
        "adapter",
    ],
)
def test_a_killed_training_goes_on_to_the_bit(make, data, settings, arguments, tmp_path):
    """A new process would build the model anew and give the same callback; so does each run here."""

    def run(folder, *others, resume=None):
        model, callback = make(), QATCallback("int8", CALIBRATION, **settings)
        one = trainer(tmp_path / folder, model, [callback, *others], data, **arguments)
        one.train(resume_from_checkpoint=resume)
        return one

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("killed", Stop(5))
    resumed = run("killed", resume=True)
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == 8
    for name, value in whole.model.state_dict().items():
        assert_same_bits(resumed.model.state_dict()[name], value, name)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"scales": FIXED}, "scales='learned', now 'fixed'"),
        ({"scales": LEARNED, "method": "tqt"}, "method='lsq', now 'tqt'"),
        ({"scales": LEARNED, "config": "int4"}, "config='int8', now 'int4'"),
        ({"scales": LEARNED, "freeze_batch_norm_after": 0.9}, "freeze_batch_norm_after=0.5, now 0.9"),
        ({"scales": LEARNED, "teacher": "self"}, r"teacher=None, now \['self', 0.5"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_other_settings_is_refused(settings, told, tmp_path, written):
    one = trainer(tmp_path, classifier(), [QATCallback(**{"config": "int8", "batches": CALIBRATION, **settings})])
    with pytest.raises(CheckpointError, match=told):
        one.train(resume_from_checkpoint=written)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    trainer(folder, classifier(), [QATCallback("int8", CALIBRATION, scales=LEARNED)], max_steps=3).train()
    return str(folder / "checkpoint-3")


def test_a_checkpoint_without_the_callback_is_refused(tmp_path):
    trainer(tmp_path, classifier(), [], max_steps=3).train()
    with pytest.raises(CheckpointError, match="written without this callback; start a new training"):
        trainer(tmp_path, classifier(), [QATCallback("int8", CALIBRATION)]).train(resume_from_checkpoint=True)


def test_a_checkpoint_is_a_quantized_model(written):
    again = transformers.BertForSequenceClassification.from_pretrained(written).eval()
    model = QATCallback("int8", CALIBRATION, scales=LEARNED).prepare(classifier())
    model.load_state_dict(again.state_dict())
    assert_same_bits(again(IDS).logits, model.eval()(IDS).logits)


def test_one_batch_and_its_parts_have_the_same_loss_and_gradients(tmp_path):
    """The share of the teacher's distance is that of the loss, also where batches have other numbers of labels."""
    texts = [
        {"input_ids": row, "labels": row.where(torch.arange(6) < 2 + place % 5, -100)} for place, row in enumerate(IDS)
    ]

    def first(folder, parts):
        callback = QATCallback("int8", CALIBRATION, teacher="float")
        settings = {"per_device_train_batch_size": 8 // parts, "gradient_accumulation_steps": parts, "max_steps": 1}
        one = trainer(tmp_path / folder, decoder(), [callback], texts, **settings)
        one.train()
        return next((entry["loss"], entry["grad_norm"]) for entry in one.state.log_history if "loss" in entry)

    assert first("parts", 4) == pytest.approx(first("whole", 1), rel=1e-5)


def test_the_teacher_is_the_model_before_it_was_prepared(tmp_path):
    callback = QATCallback(FEW_BITS, CALIBRATION, teacher="float", freeze_batch_norm_after=0.0)
    model, float_model = classifier(0.0), classifier(0.0).eval()
    one = trainer(tmp_path, model, [callback], max_steps=1, per_device_train_batch_size=32)
    with torch.no_grad():
        labels = torch.tensor([row["labels"] for row in LABELED])
        outputs, distance = fq.qat.Distillation(float_model).student(model.train(), lambda m: m(IDS, labels=labels))
    one.train()
    assert distance > 1e-6
    assert losses(one)[0] == pytest.approx(0.5 * outputs.loss.item() + 0.5 * distance.item(), rel=1e-6)


def test_the_best_model_is_loaded_and_delivered(tmp_path):
    """`finish` gets the model of the best checkpoint, quantized, and not the last one."""
    seen = []

    def finish(model):
        seen.append((model.training, {name: value.clone() for name, value in model.state_dict().items()}))
        fq.save(model, tmp_path / "saved")

    settings = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "greater_is_better": True}
    callback = QATCallback("int8", CALIBRATION, scales=LEARNED, finish=finish)
    one = trainer(tmp_path / "runs", classifier(), [callback, callback], **settings)  # twice, which is once
    one.train()
    best = transformers.BertForSequenceClassification.from_pretrained(one.state.best_model_checkpoint)
    ((training, state),) = seen
    assert not training
    assert "checkpoint-8" not in one.state.best_model_checkpoint
    for name, value in best.state_dict().items():
        assert_same_bits(state[name], value, name)
    assert_same_bits(fq.load(classifier(), tmp_path / "saved").eval()(IDS).logits, one.model(IDS).logits)


def test_evaluation_is_quantized(tmp_path):
    one = trainer(tmp_path, classifier(), [QATCallback(FEW_BITS, CALIBRATION)])
    found = one.evaluate()["eval_loss"]
    with fq.disabled(one.model):
        assert one.evaluate()["eval_loss"] != found


class Smoothed(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, inputs["labels"], label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


def test_what_a_callback_cannot_do_is_said(tmp_path):
    def fails(told, callbacks, **settings):
        with pytest.raises(ConfigError, match=told):
            trainer(tmp_path, settings.pop("model", classifier()), callbacks, **settings).train()

    def taught():
        return QATCallback("int8", CALIBRATION, teacher="float")

    fails("returned no loss to which the teacher's distance can be added", [taught()], label_smoothing_factor=0.1)
    fails("trains by another loss than the model's own", [taught()], cls=Smoothed)
    fails("already prepared", [taught(), QATCallback("int8", CALIBRATION)])
    prepared = fq.prepare(classifier(), "int8_per_token")
    fails("another QATCallback or Training watches this model", [QATCallback(), QATCallback()], model=prepared)
    fails('teacher="float" has no float model to copy', [QATCallback(teacher="float")], model=prepared)
    one = transformers.Trainer(
        args=transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        model_init=lambda: classifier(), train_dataset=LABELED, callbacks=[QATCallback("int8", CALIBRATION)],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="the Trainer made another model"):
        one.train()
    model = classifier()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    one = transformers.Trainer(
        model, args=transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), train_dataset=LABELED,
        callbacks=[QATCallback("int8", CALIBRATION, scales=LEARNED)], optimizers=(early, None),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="made before the scales became parameters"):
        one.train()


def test_a_trainer_that_cannot_prepare_leaves_the_model(tmp_path):
    model = classifier()
    before = json.dumps([str(model), sorted(model.state_dict())])
    with pytest.raises(fq.FakeQuantError):
        trainer(tmp_path, model, [QATCallback("int8", [{"input_ids": torch.full((1, 3), 99)}])])
    assert json.dumps([str(model), sorted(model.state_dict())]) == before
    trainer(tmp_path, model, [QATCallback("int8", CALIBRATION)], max_steps=1).train()


@pytest.mark.parametrize(
    "settings", [{"scales": LEARNED, "teacher": "self"}, {"scales": fq.qat.Scales.ONLY}, {"teacher": "float"}]
)
def test_after_an_interrupt_the_model_is_no_longer_watched(tmp_path, settings):
    """The Trainer has no event for it: the loss stayed half of the teacher's, and parameters stayed frozen."""
    model = classifier(dropout=0.0)
    callback = QATCallback(FEW_BITS, CALIBRATION, **settings)
    made = trainer(tmp_path, model, [callback, Stop(2)])
    trainable = [name for name, p in model.named_parameters()]
    with pytest.raises(KeyboardInterrupt):
        made.train()
    batch = {"input_ids": IDS[:8], "labels": torch.arange(8) % 2}
    with pytest.warns(UserWarning, match="an error ended the training of the Trainer"):
        loss = model.train()(**batch).loss
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trainable
    assert torch.equal(loss, model(**batch).loss)


def test_another_training_may_begin_after_an_interrupt(tmp_path):
    model = classifier()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, model, [QATCallback(FEW_BITS, CALIBRATION, teacher="self"), Stop(2)]).train()
    with pytest.warns(UserWarning, match="an error ended the training of the Trainer"):
        trainer(tmp_path / "other", model, [QATCallback(teacher="self")]).train()


def test_the_teacher_is_followed_at_the_outputs_that_the_labels_are_for():
    """A causal model predicts the next token: no output has the first label, and its place was taught all the same."""
    trained = []
    for places in ([2], [0, 2], [3]):
        model = fq.prepare(decoder(), "int4")
        fq.calibrate(model, CALIBRATION, progress=False)
        labels = torch.full_like(IDS, -100)
        labels[:, places] = IDS[:, places]
        teacher = fq.qat.Distillation(decoder(), weight=1.0)
        batches = [{"input_ids": IDS, "labels": labels}]
        fq.qat.finetune(model, batches, None, fq.qat.Schedule(10.0, 1.0, fraction=1.0), teacher=teacher)
        trained.append(model.lm_head.weight.detach())
    assert_same_bits(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


@pytest.mark.parametrize(
    ("model", "shifts"),
    [(decoder, True), (classifier, False), (t5, False), (lambda: nn.Linear(2, 2), False)],
    ids=["causal", "classes", "encoder and decoder", "plain"],
)
def test_labels_are_shifted_where_the_loss_of_the_model_shifts_them(model, shifts):
    found = labels_of_outputs(model(), IDS)
    assert torch.equal(found, torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100) if shifts else IDS)
