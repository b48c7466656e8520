"""Searches with a Hugging Face Trainer: models given back, adapters, tokenizers, the key."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from distributed import Client

from hpstage.algos import SuccessiveHalving
from hpstage.checkpoints.state_tree import clone
from hpstage.cluster import local_cluster
from hpstage.training.identity.code_identity import code_identity

pytest.importorskip("transformers")

from transformers import BertForSequenceClassification

from tests.torch.hugging_face import (
    FORK,
    OUTPUT,
    SAMPLES,
    STEPS,
    Shrinking,
    Stopping,
    Weighted,
    WithWeight,
    arguments,
    bert,
    fresh,
    gpt,
    new_bert,
    outcome,
    search,
    seeded,
    sentences,
    setup,
    text,
    trained,
    with_weight,
)

pytestmark = pytest.mark.sampled(4)


@pytest.mark.ci
def test_the_best_model_of_a_search_can_be_loaded_and_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainable = setup()
    result = search(trainable, tmp_path)
    assert [record for record in caplog.records if record.name == "hpstage"] == []  # nothing to warn of
    model = result.best_model()
    assert isinstance(model, BertForSequenceClassification) and not model.training
    loaded = result.load(result.best_trial)
    assert loaded.metrics is not None and {"eval_loss", "eval_accuracy"} == loaded.metrics.keys()
    again = loaded.trainable.trainer.evaluate()
    assert {name: again[name] for name in loaded.metrics} == loaded.metrics
    model.save_pretrained(tmp_path / "saved")
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in saved.state_dict().items())
    kept = result.trial(result.best_trial).weights()
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    assert trainable.trainer is None and not Path(OUTPUT).exists()


@pytest.mark.slow
def test_a_search_on_dask_equals_an_inline_search(tmp_path: Path) -> None:
    """Trials fork on the way, and each worker continues what the other has kept."""
    here = search(setup(), tmp_path / "here", algorithm=SuccessiveHalving(2, 2), n_trials=4)
    with local_cluster(2, gpus=0) as cluster, Client(cluster, set_as_default=False) as client:
        there = search(setup(), tmp_path / "there", algorithm=SuccessiveHalving(2, 2), n_trials=4, executor=client)
    assert [trial.intermediate_values for trial in here.study.trials] == [
        trial.intermediate_values for trial in there.study.trials
    ]
    expected = here.best_model().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in there.best_model().state_dict().items())


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
def test_states_of_a_peft_adapter_hold_no_frozen_weights(tmp_path: Path) -> None:
    """What is frozen is in no state: neither of a model that was given, nor of one around a base made once."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    base = seeded(new_bert)
    whole = sum(value.numel() for value in base.state_dict().values())

    def around(hp: Mapping[str, Any]) -> Any:
        return peft.get_peft_model(base, peft.LoraConfig(r=hp["rank"], target_modules=["query"]))

    given = setup(model=peft.get_peft_model(seeded(new_bert), config))
    for trainable, hp, names in (
        (given, {"seed": 1}, {"lora_A", "lora_B", "modules_to_save"}),
        (setup(model_init=around), {"seed": 1, "rank": 2}, {"lora_A", "lora_B"}),
    ):
        at = functools.partial(lambda step, hp: hp, hp=hp)
        adapter = trained(fresh(trainable, hp), at, 0, FORK)
        state: Any = clone(adapter.state_dict())
        kept = state["model"]
        assert all(any(part in name for part in names) for name in kept if value_of(kept[name]) > 8), list(kept)
        assert sum(map(value_of, kept.values())) < whole / 4
        straight = outcome(trained(adapter, at, FORK, STEPS))
        adapter.close()
        adapter = fresh(trainable, hp)
        adapter.load_state_dict(state)
        assert outcome(trained(adapter, at, FORK, STEPS)) == straight
        adapter.close()
    result = search(given, tmp_path, n_trials=1)
    assert isinstance(result.best_model(), peft.PeftModel)
    assert all(
        not p.is_inference() and p.requires_grad == ("lora" in n or "save" in n)
        for n, p in given.pretrained.named_parameters()
    )


def value_of(tensor: torch.Tensor) -> int:
    return tensor.numel()


def test_hyperparameters_are_passed_to_model_init_and_to_user_defined_training_arguments() -> None:
    def hp(step: int) -> dict[str, Any]:
        return {"width": 8, "weight": 1 if step < 2 else 0.25, "optim": "sgd", "seed": 1}

    trainable = setup(model_init=bert, trainer_class=Weighted, args=WithWeight(**with_weight))
    adapter = trained(fresh(trainable, hp(0)), hp, 0, 4)
    assert trainable.trainer.model.config.hidden_size == 8
    assert trainable.trainer.args.weight == 0.25
    assert trainable.trainer.computed == 4
    adapter.close()


def words() -> Any:
    """A fast tokenizer, whose settings of padding and truncation lie in Rust."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    rust = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, **{str(i): i for i in range(2, 40)}}, unk_token="[UNK]"))
    rust.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=rust, pad_token="[PAD]", unk_token="[UNK]")


class Tokenizing:
    """A collator of texts. It truncates more from call to call, by what the tokenizer has been set to before."""

    def __init__(self) -> None:
        self.tokenizer = words()

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        backend = self.tokenizer.backend_tokenizer
        backend.enable_truncation(max(2, (backend.truncation or {"max_length": 7})["max_length"] - 1))
        backend.enable_padding()
        rows = backend.encode_batch([" ".join(map(str, sample["input_ids"])) for sample in samples])
        return {
            "input_ids": torch.tensor([row.ids for row in rows]),
            "labels": torch.tensor([sample["label"] for sample in samples]),
        }


def test_settings_of_a_rust_tokenizer_are_in_the_state() -> None:
    hp = {"learning_rate": 1e-2, "seed": 1}
    straight = trained(fresh(setup(data_collator=Tokenizing()), hp), lambda step: hp, 0, 4)
    kept = clone(straight.state_dict())
    trained(straight, lambda step: hp, 4, 6)
    forked = fresh(setup(data_collator=Tokenizing()), hp)
    forked.load_state_dict(kept)
    trained(forked, lambda step: hp, 4, 6)
    assert outcome(forked) == outcome(straight)
    assert forked.subject.given["data_collator"].tokenizer.backend_tokenizer.truncation["max_length"] == 2


@pytest.mark.ci
def test_a_tokenizer_given_as_processing_class_pads_the_batches(tmp_path: Path) -> None:
    tokenizer = words()

    class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
        """Tokenized when they are read."""

        def __init__(self, samples: list[dict[str, Any]]) -> None:
            self.texts = [" ".join(map(str, sample["input_ids"])) for sample in samples]
            self.labels = [sample["label"] for sample in samples]

        def __len__(self) -> int:
            return len(self.texts)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**tokenizer(self.texts[index], truncation=True, max_length=5), "label": self.labels[index]}

    trainable = setup(
        data_collator=None,
        processing_class=tokenizer,
        train_dataset=Sentences(sentences(SAMPLES, 0)),
        eval_dataset={"one": Sentences(sentences(5, 1)), "two": Sentences(sentences(5, 2))},
    )
    result = search(trainable, tmp_path, metric="eval_two_accuracy", n_trials=1)
    metrics = result.load(0).metrics
    assert metrics is not None
    assert metrics.keys() == {f"eval_{name}_{metric}" for name in ("one", "two") for metric in ("accuracy", "loss")}


def test_a_callback_may_end_a_trial(tmp_path: Path) -> None:
    result = search(setup(callbacks=[Stopping("training")]), tmp_path, n_trials=2)
    assert [trial.state for trial in result.study.trials] == [optuna.trial.TrialState.COMPLETE] * 2
    assert [result.load(number).step for number in range(2)] == [3, 3]


def identity(**given: Any) -> object:
    return code_identity(setup(**given))


@pytest.mark.ci
def test_only_arguments_that_affect_training_or_evaluation_are_in_the_key() -> None:
    usual = identity()
    assert usual == identity()
    assert usual == identity(
        args=arguments(logging_steps=7, save_strategy="no", run_name="mine", eval_strategy="epoch")
    )
    for other in (
        {"args": arguments(weight_decay=0.1)},
        {"args": arguments(per_device_eval_batch_size=3)},
        {"eval_dataset": sentences(9, 2)},
        {"train_dataset": sentences(SAMPLES, 2)},
        {"data_collator": text},
        {"model_init": gpt},
        {"compute_metrics": None},
        {"trainer_class": Weighted},
        {"callbacks": [Shrinking()]},
        {"model": seeded(new_bert)},
    ):
        assert identity(**other) != usual, other
    assert identity(model=seeded(new_bert)) == identity(model=seeded(new_bert)) != identity(model=new_bert())
