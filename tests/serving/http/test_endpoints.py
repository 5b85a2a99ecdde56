"""What isn't generation: health, models, tokenizing, metrics, the description."""

import re
from pathlib import Path

import httpx
import pytest
import tokenizers
from support.server import running_server
from support.tiny_checkpoint import SPECIAL, TEMPLATE

from ropeway.compiler.version import VERSION

NAME = "tiny"


def error_of(answer: httpx.Response) -> dict[str, object]:
    """The error object, which has exactly OpenAI's fields."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_health(http: httpx.Client) -> None:
    for path in ("/health", "/ready", "/ping"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert http.get("/version").json() == {"version": VERSION}


def test_models(http: httpx.Client) -> None:
    [model] = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (NAME, "model", 512)
    assert http.get(f"/v1/models/{NAME}").json() == model
    answer = http.get("/v1/models/other")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"


def test_every_answer_names_its_request(http: httpx.Client) -> None:
    answers = [http.get("/health"), http.get("/nothing"), http.post("/tokenize", json={})]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"req_[0-9a-f]{24}", one) for one in ids)


def test_tokenize_a_prompt(http: httpx.Client, reference: tokenizers.Tokenizer) -> None:
    text = "a héllo <|end|>\n"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    wanted = reference.encode(text).ids
    assert answer["tokens"] == wanted
    assert (answer["count"], answer["max_model_len"]) == (len(wanted), 512)
    assert answer["token_strs"][0] == "a"
    assert answer["token_strs"][-2:] == ["<|end|>", "\n"]
    back = http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


def test_tokenize_a_chat(http: httpx.Client, reference: tokenizers.Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = http.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == reference.encode("<|user|>hi<|end|><|assistant|>").ids
    asked = {"messages": messages, "add_generation_prompt": False}
    answer = http.post("/tokenize", json=asked).json()
    assert answer["tokens"] == reference.encode("<|user|>hi<|end|>").ids


def test_special_tokens_in_a_chat_stay_text(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "<|end|>"}]
    asked = {"messages": messages, "add_generation_prompt": False}
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    assert tokens[0] == 256 + SPECIAL.index("<|user|>")
    assert tokens[-1] == 256
    assert all(token < 256 for token in tokens[1:-1])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 260]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 1 << 70]}, "tokens[1]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_bad_fields_are_named(
    http: httpx.Client, path: str, body: dict[str, object], param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def _metric(text: str, name: str, **labels: str) -> float:
    for line in text.splitlines():
        found = re.fullmatch(rf"{re.escape(name)}\{{(.*)\}} (\S+)", line)
        if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
            return float(found[2])
    raise AssertionError(f"no {name} {labels}")


def test_metrics_count_requests(http: httpx.Client) -> None:
    before = http.get("/metrics").text
    asked = {"prompt": "abcdef", "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    assert http.post("/v1/completions", json=asked).status_code == 200
    after = http.get("/metrics").text

    def grown(name: str, **labels: str) -> float:
        return _metric(after, name, **labels) - _metric(before, name, **labels)

    assert grown("vllm:prompt_tokens_total", model_name=NAME) == 6
    assert grown("vllm:generation_tokens_total") == 3
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("vllm:inter_token_latency_seconds_count") == 2
    assert grown("vllm:request_time_per_output_token_seconds_count") == 1
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert grown("vllm:request_prompt_tokens_sum") == 6
    assert grown("vllm:request_prompt_tokens_bucket", le="5.0") == 0
    assert grown("vllm:request_prompt_tokens_bucket", le="10.0") == 1
    assert grown("vllm:request_generation_tokens_sum") == 3
    assert _metric(after, "vllm:request_success_total", finished_reason="length") >= 1
    assert _metric(after, "vllm:num_requests_running") == 0
    assert _metric(after, "vllm:num_requests_waiting") == 0
    assert _metric(after, "vllm:kv_cache_usage_perc") == 0
    assert _metric(after, "vllm:prefix_cache_queries_total") >= 6
    assert _metric(after, "vllm:prefix_cache_hits_total") >= 0
    assert _metric(after, "vllm:num_preemptions_total") == 0


def test_description(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models/{model}"):
        assert path in document["paths"]
    operations = [op for item in document["paths"].values() for op in item.values()]
    assert len({op["operationId"] for op in operations}) == len(operations)
    for reference in re.findall(r'"\$ref": ?"#/components/schemas/([^"]+)"', str(document)):
        assert reference in document["components"]["schemas"]


def test_names_and_template_of_ones_own(tiny_artifact: Path, tmp_path: Path) -> None:
    template = tmp_path / "shout.jinja"
    template.write_text(TEMPLATE.replace("m['content']", "m['content'] | upper"))
    names = ("--served-model-name", "org/one", "--served-model-name", "two")
    options = (*names, "--chat-template", template)
    with running_server(tiny_artifact, *options) as server, server.client() as http:
        data = http.get("/v1/models").json()["data"]
        assert [(model["id"], model["root"]) for model in data] == [
            ("org/one", NAME),
            ("two", NAME),
        ]
        assert http.get("/v1/models/org/one").json() == data[0]
        assert http.get(f"/v1/models/{NAME}").status_code == 404
        asked = {"messages": [{"role": "user", "content": "ab"}], "add_generation_prompt": False}
        tokens = http.post("/tokenize", json=asked).json()["tokens"]
        assert tokens == [256 + SPECIAL.index("<|user|>"), *_bytes(http, "AB"), 256]


def _bytes(http: httpx.Client, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text}).json()["tokens"]


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> tokenizers.Tokenizer:
    """The checkpoint's tokenizer, read by the library itself."""
    return tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
