#!/usr/bin/env python3
"""Writes tests/testdata/pre_tokenizers.json: how the tokenizers library cuts hard texts into words.

Run from the repository's root, with tokenizers installed. Each entry is named after the GGUF name whose authors'
tokenizer.json has these steps; "default" are llama.cpp's own. The lists are the lengths of words, in bytes.
"""
import json

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import Digits, Sequence, Split

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+END|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*END"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943")
NOT_HAN = r"&&[^\p{Han}]]"


def split(*patterns):
    return Sequence([Split(Regex(p), "isolated") if isinstance(p, str) else p for p in patterns])


STEPS = {
    "gpt-2": split(GPT2),
    "smollm": split(Digits(True), GPT2),
    "llama-bpe": split(LLAMA3),
    "minicpm5": split(r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")),
    "qwen2": split(LLAMA3.replace("{1,3}", "")),
    "qwen35": split(LLAMA3.replace("{1,3}", "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
        r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")),
    "seed-coder": split(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
                        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "bailingmoe": split(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
    "exaone-moe": split(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
                        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"),
    "gpt-4o": split(WORDS.replace("END", ENDING) + r"|\p{N}{1,3}" + TAIL),
    "tekken": split(WORDS.replace("END", "") + r"|\p{N}" + TAIL),
    "kimi-k2": split(r"[\p{Han}]+|" + WORDS.replace("END", ENDING).replace(r"\p{M}]", r"\p{M}" + NOT_HAN) +
                     r"|\p{N}{1,3}" + TAIL.replace("/", "")),
    "deepseek-llm": split("[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
                          "[一-龥ࠀ-一가-퟿]+", Digits(True)),
    "deepseek-coder": split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", Digits(True)),
    "deepseek-v3": split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
                         r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                         r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "bloom": split(BLOOM),
    "viking": split(BLOOM, Digits(True)),
    "default": split(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}

TEXTS = [
    "", " ", "   ", "\t", "\n", "\r\n", " \n", "\n ", "\n\n\n", " \t \r\n \n  x", "a  b   c    d  ", "x \n\n y\n\n  ",
    "Hello world", " Hello  world ", "\r\nline\r\n\r\nline\r", "three words here", "I'm you're he'll it's don't I'd",
    "I'M YOU'RE DON'T IT'S 'tis 's 'S '\u017f ''s it'sx o'clock's", "iPhone HTTPServer XMLHttp aBCd ABc's DON'Ts",
    "1", "12", "1234", "12345678901234567890", "3.14159 1,000,000 ½ ² ٣٤ Ⅷ ① 2nd a1b22c333d4444", "v1.2-rc3 x86_64",
    "x = y+1; // comment\n\tif (a && !b) { return \"str\\n\"; }/\n", "def f(x):\n    return x ** 2\n\n\nclass A:\n        pass",
    "👩‍👩‍👧‍👦 family 👍🏽 a😀b❤️", "e\u0301 é n\u0303 ñ Z͑ͫ̓ͪ̂ͫ̽͏̴", "Привет, мир! Ёж's", "你好，世界。中文abc漢字 123", "こんにちは 世界カタカナｶﾅ、",
    "안녕하세요 \u1112\u1161\u11ab한 ㄱㄴ", "مرحبا، بالعالم۔", "שלום עולם", "नमस्ते दुनिया। है", "สวัสดี ครับ", "ქართული ᲥᲐᲠᲗᲣᲚᲘ Ꭰꭰ",
    "mixed Привет你好hello안녕 naïve café Å ﬁ Ω K ᾳ \U00010400 𝒳", "…!!??,,..()[]{}<>|~^`$+=€£±×÷≤ « » ‘’ “” ！？（）",
    "\u00a0nbsp\u00a0\u3000wide\u2009thin\u200bzero\ufeffbom\u180emvs\u0085nel\u2028ls\u2029ps", "\x00nul\x01\x1b[0m\x7f\x80\x1c\x1f",
    "!!!???...---___***", "#include <stdio.h>", "https://example.com/a?b=c&d=%20#frag user@example.com /usr/bin//x", "    中 \t文  ",
    "<|im_start|> <s> [INST]", "\U0010ffff\ufffd\ue000", "'", " '", "\n'll", "'re'", ".\n .\n", "a.\n\nb!\r\n\n", "日本\n  語 ", "9\n 8  ",
]


def lengths(steps, text):
    return [len(text[start:end].encode()) for _, (start, end) in steps.pre_tokenize_str(text)]


with open("tests/testdata/pre_tokenizers.json", "w", encoding="utf-8") as file:
    rows = {name: [lengths(steps, text) for text in TEXTS] for name, steps in STEPS.items()}
    json.dump({"texts": TEXTS, "words": rows}, file, ensure_ascii=True, separators=(",", ":"))
    file.write("\n")
