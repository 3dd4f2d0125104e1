"""A model of Tamis for EleutherAI's evaluation harness, `lm_eval` (pip install "tamis[lm_eval]").

python -m tamis.evaluate.harness --model tamis --model_args pretrained=artifacts/m7c_125m --tasks lambada_openai
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]
from lm_eval.api.registry import register_model  # type: ignore[import-not-found]

from tamis.evaluate.scoring import ScoredText, score
from tamis.generate.load import load_model
from tamis.generate.sample import generate_text

DEFAULT_NEW_TOKENS = 256


@register_model("tamis")
class HarnessModel(TemplateLM):
    """A checkpoint, run directory or exported folder (`pretrained`) that answers the harness's requests.

    Texts are scored as `tamis eval` scores them: after end-of-text, the oldest tokens dropped where there are too many.
    """

    def __init__(
        self, pretrained: str, device: str = "auto", max_len: int | None = None, precision: str | None = None, **_: Any
    ) -> None:
        super().__init__()
        name = (device or "auto").partition(":")[0]
        loaded = load_model(pretrained, device=name, max_len=max_len, precision=precision)
        self.decoder, self.tokens = loaded.model, loaded.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = [int(i) for i in self.tokens.encode(string)]
        return ids if add_special_tokens is False else [self.tokens.eot, *ids]

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        texts = [self._text(context, continuation) for _, context, continuation in requests]
        return [(found.log_probability, found.is_greedy) for found in score(self.decoder, texts)]

    def _text(self, context: list[int], continuation: list[int]) -> ScoredText:
        ids = [*context, *continuation][-self.decoder.max_len - 1 :]
        return ScoredText(ids, max(1, len(ids) - len(continuation)))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows that each begin with the token before."""
        length, totals = self.decoder.max_len, []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = [ids[i : i + length + 1] for i in range(0, len(ids) - 1, length)]
            totals.append(sum(s.log_probability for s in score(self.decoder, [ScoredText(w, 1) for w in windows])))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt greedily up to the first of its stop texts."""
        return [self._until(*request.args) for request in requests]

    def _until(self, prompt: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        wanted = options.get("max_gen_toks", DEFAULT_NEW_TOKENS)
        room = self.decoder.max_len - wanted
        prompt = self.tokens.decode([int(i) for i in self.tokens.encode(prompt)][-room:]) if room > 0 else prompt
        temperature, text = options.get("temperature", 0.0) if options.get("do_sample") else 0.0, ""
        for piece in generate_text(self.decoder, self.tokens, prompt, wanted, temperature=temperature):
            text += piece
            if found := [text.index(stop) for stop in stops if stop in text]:
                return text[: min(found)]
        return text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found]

    cli_evaluate()
