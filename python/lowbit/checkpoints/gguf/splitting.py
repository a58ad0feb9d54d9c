# SPDX-License-Identifier: Apache-2.0
"""The pre-tokenization of byte-level tokenizers, by ``tokenizer.ggml.pre``: regular expressions and rules, as in
llama.cpp (src/llama-vocab.cpp)."""

from __future__ import annotations

from dataclasses import dataclass

_ENDINGS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # English contractions
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _REST.replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENDING|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENDING"
    r"|\p{N}COUNT| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (
    r"\p{Han}+|"
    + "".join(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}&&[^\p{{Han}}]]{upper}{_LOWER[:-1]}&&[^\p{{Han}}]]{lower}{_ENDINGS}?|"
        for upper, lower in ("*+", "+*")
    )
    + r"\p{N}{1,3}"
    + _REST
)
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻ"
    "Ȿ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters that have cases."""
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """The pre-tokenization of one kind of tokenizer."""

    expressions: tuple[str, ...]
    """Regular expressions, applied in turn to the pieces left by the one before. Text between two matches is a piece
    too."""
    whole_words: bool = False
    """Whether a piece that is in the vocabulary becomes that token, whatever the merges say."""
    begins: bool = False
    """Whether a text begins with BOS if the file does not say so."""


_KINDS = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Splitting(
        (_LLAMA3,), whole_words=True, begins=True
    ),
    "glm4 glm5": Splitting((_LLAMA3,), whole_words=True),
    "dbrx smaug-bpe chatglm-bpe": Splitting((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open": Splitting((_QWEN2,)),
    "qwen35": Splitting((_QWEN35,)),
    "kimi-k2": Splitting((_KIMI,)),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": Splitting((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Splitting((r"\p{N}", _GPT2)),
    "tekken": Splitting((_TEKKEN.replace("ENDING", "").replace("COUNT", ""),), whole_words=True, begins=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Splitting(
        (_TEKKEN.replace("ENDING", f"{_ENDINGS}?").replace("COUNT", "{1,3}"),)
    ),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-llm": Splitting(_DEEPSEEK),
    "deepseek-v3 hunyuan-dense joyai-llm": Splitting(_DEEPSEEK3),
    "falcon": Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
SPLITTINGS = {name: splitting for names, splitting in _KINDS.items() for name in names.split()}
"""Pre-tokenizations by ``tokenizer.ggml.pre``; "default" is used for files without this key."""
