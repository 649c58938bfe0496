"""Tasks of lm-evaluation-harness on our engine, with the real package: log-likelihoods and texts against plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from posttrain import cli
from posttrain.commands import harness
from posttrain.errors import UserError
from posttrain.models.load import stop_ids
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.stages.base import make_sampler
from posttrain.tasks.arithmetic import ALPHABET

ROWS = [{"question": f"{n}+1=", "choices": [str(n + 1), "7"], "answer": 0, "text": f"{n}+1={n + 1}"} for n in (1, 2, 3)]
KINDS: dict[str, dict[str, Any]] = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"},
    "text": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "written": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["="], "max_gen_toks": 5},
    },
}
METRICS = {"choice": "acc", "text": "word_perplexity", "written": "exact_match"}


@pytest.fixture(scope="module")
def package() -> None:
    reason = "needs lm-evaluation-harness: pip install 'posttrain[harness]'"
    pytest.importorskip("lm_eval", reason=reason)


@pytest.fixture(scope="module")
def policy() -> Policy:
    tokenizer = character_tokenizer(ALPHABET)
    made = tiny_model(tokenizer, "nano", 0)
    return wrap_model(made, tokenizer, stop_ids(made, tokenizer))


@pytest.fixture
def model(package: None, policy: Policy) -> harness.HarnessModel:
    return harness.HarnessModel(policy, make_sampler(policy), harness.HarnessOptions(device="cpu", max_length=8))


def logprob(policy: Policy, before: list[int], after: list[int]) -> tuple[float, bool]:
    """By the plain model."""
    ids = [*before, *after]
    with torch.no_grad():
        table = policy.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)[len(before) - 1 : -1]
    values = table[torch.arange(len(after)), torch.tensor(after)]
    return float(values.sum()), bool((table.argmax(-1) == torch.tensor(after)).all())


def asked(*given: Any) -> Any:
    return SimpleNamespace(args=given)


@pytest.mark.peers
def test_log_likelihoods_are_those_of_the_plain_model(model: harness.HarnessModel, policy: Policy) -> None:
    best = policy.tokenizer.decode(int(policy.model(torch.tensor([model.tok_encode("1+2=")])).logits[0, -1].argmax()))
    pairs = [("1+2=", best), ("1+2=", "3"), ("", "12"), ("12345678901+2=", "3")]
    found = model.loglikelihood([asked(*pair) for pair in pairs])
    encode = model.tok_encode
    contexts = [encode("1+2="), encode("1+2="), [model.prefix_token_id], encode("12345678901+2=")[-7:]]
    for (total, greedy), before, (_, after) in zip(found, contexts, pairs, strict=True):
        expected = logprob(policy, before, encode(after))
        assert total == pytest.approx(expected[0], abs=1e-4) and greedy == expected[1]
    assert (found[0][1] and not found[1][1]) or best == "3"


@pytest.mark.peers
def test_a_long_text_is_predicted_in_windows_each_token_once(model: harness.HarnessModel, policy: Policy) -> None:
    short, long = model.loglikelihood_rolling([asked("1+2"), asked("12+34=46 5")])
    first, encode = [model.prefix_token_id], model.tok_encode
    assert short == pytest.approx(logprob(policy, first, encode("1+2"))[0], abs=1e-4)
    ids = encode("12+34=46 5")  # 7 after the prefix, then 3 more after the 5 that fit before them
    parts = [logprob(policy, first, ids[:7])[0], logprob(policy, ids[2:7], ids[7:])[0]]
    assert long == pytest.approx(sum(parts), abs=1e-4)


@pytest.mark.peers
def test_texts_are_greedy_and_end_at_the_first_stop(model: harness.HarnessModel, policy: Policy) -> None:
    ids = model.tok_encode("1+2=")
    for _ in range(3):
        ids.append(int(policy.model(torch.tensor([ids])).logits[0, -1].argmax()))
    whole = harness.Decoder(policy.tokenizer).decode(tuple(ids[4:]))[0]
    plain, stopped = model.generate_until(
        [asked("1+2=", {"max_gen_toks": 3}), asked("1+2=", {"max_gen_toks": 3, "until": whole[1:2]})]
    )
    assert plain == whole and stopped == harness.cut(whole, [whole[1]])


def write(folder: Path, kind: str) -> Path:
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {
        "task": f"tiny_{kind}", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
        "test_split": "test", "doc_to_text": "{{question}}", "metric_list": [{"metric": METRICS[kind]}], **KINDS[kind],
    }  # fmt: skip
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(task))
    return file


@pytest.mark.peers
def test_local_task_files_are_evaluated(
    package: None, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    save(policy.model, policy.tokenizer, tmp_path / "model")
    files = ",".join(str(write(tmp_path, kind)) for kind in KINDS)
    assert cli.main(["eval", str(tmp_path / "model"), "--harness", files, "device=cpu", "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]
    assert {name: figures["documents"] for name, figures in tasks.items()} == {f"tiny_{kind}": 3 for kind in KINDS}
    right = 0
    tokenizer = policy.tokenizer
    for row in ROWS:
        before = list(tokenizer(row["question"], add_special_tokens=False)["input_ids"])
        scores = [logprob(policy, before, list(tokenizer(c, add_special_tokens=False)["input_ids"]))[0] for c in row["choices"]]
        right += scores[0] > scores[1]
    value, low, high = tasks["tiny_choice"]["acc"]
    assert value == pytest.approx(right / 3) and low <= value <= high
    assert tasks["tiny_text"]["word_perplexity"] > 1 and 0 <= tasks["tiny_written"]["exact_match"][0] <= 1


@pytest.mark.peers
def test_repeated_requests_are_different_samples(model: harness.HarnessModel) -> None:
    drawn = model.generate_until([asked("1+2=", {"do_sample": True, "max_gen_toks": 4})] * 6)
    assert len(set(drawn)) > 1, "a vote over one sample that was drawn six times"
    again = model.generate_until([asked("1+2=", {"temperature": 1.0, "max_gen_toks": 4})] * 6)
    assert again == drawn, "a temperature alone samples, as in the harness"


@pytest.mark.peers
def test_a_prompt_is_cut_only_where_it_is_said(model: harness.HarnessModel) -> None:
    """8 tokens: a completion of 8 would leave none for the prompt; one of 3 leaves 5."""
    with pytest.raises(UserError, match="max_gen_toks=8 leaves no room for a prompt in 8 tokens; raise max_length"):
        model.generate_until([asked("1+2=", {"max_gen_toks": 8})])
    with pytest.raises(UserError, match="max_gen_toks: input should be a valid integer"):
        model.generate_until([asked("1+2=", {"max_gen_toks": "many"})])
    model.generate_until([asked("1+2=", {"max_new_tokens": 4})])
    assert model.cut == 0, "max_new_tokens is the same key"
    model.generate_until([asked("11+22=", {"max_gen_toks": 3})])
    assert model.cut == 1


@pytest.mark.peers
def test_tags_and_damaged_tasks_of_a_file(
    package: None, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    save(policy.model, policy.tokenizer, tmp_path / "model")
    file = write(tmp_path, "choice")
    whole = yaml.safe_load(file.read_text())
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**whole, "task": "other", "tag": "several"}))
    line = ["eval", str(tmp_path / "model"), "--harness"]
    assert cli.main([*line, f"{file},several", "device=cpu", "max_length=4"]) == 0
    said = capsys.readouterr().out
    assert "on 3 documents of other" in said and "12 inputs lost the beginning: longer than max_length" in said
    file.write_text(yaml.safe_dump({**whole, "test_split": "nowhere"}))
    assert cli.main([*line, str(file), "device=cpu"]) == 2
    error = capsys.readouterr().err
    assert "eval: lm-evaluation-harness cannot run tiny_choice: KeyError: 'nowhere'" in error and "Traceback" not in error


@pytest.mark.peers
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--harness", "nowhere.yaml"], "there is no task file nowhere.yaml"),
        (["--harness", "x", "limit=-1"], "limit"),
        (["--harness", "x", "--against", "b"], "--against compares two models on a --task"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    package: None, given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "m", *given]) == 2
    assert complaint in capsys.readouterr().err


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "TemplateLM", object)
    assert cli.main(["eval", "m", "--harness", "x.yaml"]) == 2
    assert "pip install 'posttrain[harness]'" in capsys.readouterr().err


def test_options_are_checked_by_their_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.HarnessOptions(seed=2**40).seed == 2**40, "a seed may be larger than a count"
    assert cli.main(["eval", "m", "--harness", "x", "limit=-1"]) == 2
    assert capsys.readouterr().err == "posttrain: eval: limit must be at least 0, not -1\n"


def test_documents_with_the_same_prompt_are_one_observation() -> None:
    """29 prompts that were asked 17 times are 29; a figure that is no mean has no interval."""
    samples = [{"doc_id": n, "prompt_hash": str(n % 29), "filter": "none", "acc": float(n % 2 == 0)} for n in range(29)]
    again = [{**s, "doc_id": 29 * t + s["doc_id"]} for t in range(17) for s in samples]
    result = {"acc,none": 15 / 29, "acc_stderr,none": 0.1, "perplexity,none": 3.0, "alias": "x"}
    once, often = (harness._figures(result, rows) for rows in (samples, again))
    assert once["acc"] == often["acc"] and (once["documents"], often["documents"]) == (29, 493) and once["perplexity"] == 3.0
