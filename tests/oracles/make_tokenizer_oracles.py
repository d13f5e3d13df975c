#!/usr/bin/env python3
"""Writes tests/testdata/tokenizers/: small tokenizers with what the authors' libraries make of hard text.

Run from the repository's root, with tokenizers, sentencepiece, transformers, tiktoken and gguf installed. With "added"
for an argument it writes the tokenizers of added tokens alone, with "gemma" or "kimi" that family's. For the default model (first argument: its
GGUF file), only texts and ids are kept; the test reads the vocabulary from the file itself.
"""
import io
import json
import os
import random
import shutil
import sys

import gguf
import sentencepiece
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, processors, trainers)

OUT = "tests/testdata/tokenizers"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
GPT4O = "|".join(r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]" + capitals + r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]" + others
                 + "(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for capitals, others in ("*+", "+*")) + (
                     r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

HARD = [
    "", " ", "  ", "   ", "\t", "\n", "\r\n", " \n", "\n ", "\n\n\n", " \t \r\n \n  x", "a  b   c    d",
    "Hello world", " Hello world", "Hello  world ", "hello\nworld\n", "\r\nline\r\n\r\nline\r",
    "I'm you're he'll we've it's don't I'd I'M YOU'RE DON'T IT'S 'tis 's 'S 'ſ ''s it'sx",
    "1", "12", "123", "1234", "12345678901234567890", "3.14159 1,000,000 ½ ² ٣٤ Ⅷ ① 2nd", "a1b22c333d4444",
    "x = y+1; // comment\n\tif (a && !b) { return \"str\\n\"; }\n", "def f(x):\n    return x ** 2\n\n\nclass A:\n        pass",
    "😀", "👩‍👩‍👧‍👦 family", "👍🏽👍🏿", "🇩🇪🇫🇷", "a😀b🤖c", "❤️", "e\u0301 é n\u0303 ñ", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A",
    "Привет, мир!", "你好，世界", "こんにちは 世界", "안녕하세요", "\u1112\u1161\u11ab한", "مرحبا بالعالم", "שלום", "नमस्ते दुनिया", "สวัสดี",
    "mixed Привет你好hello안녕", "naïve café Ångström Å Å ﬁ Ω Ω", "\u00a0nbsp\u00a0\u3000wide\u2009thin\u200bzero\ufeffbom\u180emvs\u0085nel\u2028ls\u2029ps",
    "\x00nul\x01\x02\x1b[0m\x7f\x80", "\x1c\x1d\x1e\x1f", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 3,
    "!!!???...---___***", "#include <stdio.h>", "https://example.com/a?b=c&d=%20#frag", "user@example.com", "$€£¥₿ ±×÷ ≤≥≠",
    "▁ already ▁ there▁", "<0x0A> <0x41>", "<s> </s> <unk>", "a<s>b", "x</s>", "<|endoftext|>", "a <|im_start|>user\nhi<|im_end|>\n b",
    "<|im_start|><|im_end|><|im_start", "<|im_<|im_end|>", "<|begin_of_text|>Hi<|eot_id|>", "<tool>x</tool>", "a  <mask>  b", "<mask>", "x <pad> y",
    "   leading and trailing   ", "tab\tseparated\tvalues\n", "\U0010ffff\ufffd\ue000", "ĠĊč Ġ", "the the The THE tHe", "'", "''", " '", "\n'll", "a'", "'re'", "\n\n  \n\n x", "x\n \n y", " .\n .", "a.\n\nb!\r\n",
]


def corpus():
    """Text to train on: this project's own files, and the hard strings."""
    lines = list(HARD)
    for folder, _, files in sorted(os.walk("models")):
        for name in sorted(files):
            if name.endswith(".h"):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    lines += file.read().split("\n")
    lines += ["The quick brown fox jumps over the lazy dog, and the iteration schedules the request. "] * 3
    return lines


def cases(encode, decode, texts=HARD, undecoded=()):
    """Without the decoded text where ids are among `undecoded`."""
    rows = []
    for text in texts:
        with_special, without = encode(text, True), encode(text, False)
        row = {"text": text, "ids": with_special, "decoded": decode(with_special, False)}
        if set(with_special) & set(undecoded):
            del row["decoded"]
        if without != with_special:
            row["bare"] = without
        rows.append(row)
    return rows


def random_decodes(decode, size, first=0, count=60):
    """Ids in any order, from `first` on: bytes that make no characters."""
    source = random.Random(7)
    rows = []
    for _ in range(count):
        ids = [source.randrange(first, size) for _ in range(source.randrange(1, 24))]
        rows.append({"ids": ids, "decoded": decode(ids, True)})
    return rows


def library_functions(tokenizer):
    def encode(text, special):
        return tokenizer.encode(text, add_special_tokens=special).ids

    def decode(ids, special):
        return tokenizer.decode(ids, skip_special_tokens=not special)

    return encode, decode


def write(name, value):
    with open(f"{OUT}/{name}.json", "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=True, separators=(",", ":"))
        file.write("\n")


def save(name, tokenizer, config, decodes_at_random=True, string_merges=False, texts=HARD, undecoded=()):
    folder = f"{OUT}/{name}"
    os.makedirs(folder, exist_ok=True)
    state = json.loads(tokenizer.to_str())
    if string_merges:
        state["model"]["merges"] = [" ".join(merge) for merge in state["model"]["merges"]]
    with open(f"{folder}/tokenizer.json", "w", encoding="utf-8") as file:
        json.dump(state, file, ensure_ascii=False, separators=(",", ":"))
    with open(f"{folder}/tokenizer_config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    encode, decode = library_functions(tokenizer)
    oracle = {"cases": cases(encode, decode, texts, undecoded)}
    if decodes_at_random:
        oracle["random"] = random_decodes(decode, tokenizer.get_vocab_size())
    write(f"{name}/oracle", oracle)


def byte_level(name, pre, special, config, normalizer=None, ignore_merges=False, template=None,
               added=(), string_merges=False, size=700):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus(), trainer)
    if ignore_merges:
        # A word that no merge reaches, as Llama 3's vocabulary has them.
        state = json.loads(tokenizer.to_str())
        vocabulary = state["model"]["vocab"]
        for word in ("Ġworld", "Hello", "12", "123"):
            vocabulary.setdefault(word, len(vocabulary))
        tokenizer = Tokenizer.from_str(json.dumps(state))
    if template:
        tokenizer.post_processor = template(tokenizer)
    tokenizer.add_tokens(list(added))
    save(name, tokenizer, config, string_merges=string_merges)


def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level_family():
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level("gpt-2", gpt2, ["<|endoftext|>"],
               {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, string_merges=True,
               added=[AddedToken("<mask>", lstrip=True, rstrip=True),
                      AddedToken("<tool>", special=False)])
    smollm = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    byte_level("smollm", smollm, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
               {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
    byte_level("olmo", gpt2, ["<|endoftext|>"], {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
               normalizer=normalizers.NFC(), size=500)
    falcon = pre_tokenizers.Sequence([pre_tokenizers.Punctuation("contiguous"), gpt2, pre_tokenizers.Digits(False),
                                      pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")])
    byte_level("falcon", falcon, ["<|endoftext|>"], {"eos_token": "<|endoftext|>"}, size=600)
    byte_level("bloom", split(BLOOM), ["<unk>", "<s>", "</s>", "<pad>"],
               {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, size=600)
    llama3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    byte_level("llama-bpe", split(LLAMA3), llama3,
               {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, ignore_merges=True,
               template=lambda t: processors.Sequence([
                   processors.ByteLevel(trim_offsets=True),
                   processors.TemplateProcessing(
                       single="<|begin_of_text|> $A",
                       pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                       special_tokens=[("<|begin_of_text|>",
                                        t.token_to_id("<|begin_of_text|>"))])]))
    byte_level("qwen2", split(QWEN2), [], {"bos_token": None, "eos_token": "<|im_end|>"},
               normalizer=normalizers.NFC(),
               added=[AddedToken("<|endoftext|>", special=True, normalized=False),
                      AddedToken("<|im_start|>", special=True, normalized=False),
                      AddedToken("<|im_end|>", special=True, normalized=False),
                      AddedToken("<tool>", special=False, normalized=False)])
    byte_level("gpt-4o", split(GPT4O), ["<|startoftext|>", "<|return|>"],
               {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}, size=600)


def train_sentencepiece():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in corpus() if line.strip() and "\x00" not in line),
        model_writer=model, vocab_size=800, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        character_coverage=0.98, minloglevel=2)
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_family():
    processor = train_sentencepiece()
    size = processor.get_piece_size()
    pieces = [processor.id_to_piece(i) for i in range(size)]
    ids = {piece: i for i, piece in enumerate(pieces)}
    kinds = [processor.is_unknown(i) and 1 or processor.is_control(i) and 2 or
             processor.is_byte(i) and 3 or 0 for i in range(size)]

    # As GGUF keeps it: scores, no merges. The oracle is the sentencepiece library itself.
    rows = []
    for text in HARD:
        if "\x00" in text or any(special in text for special in ("<s>", "</s>", "<unk>")):
            continue
        encoded = processor.encode(text)
        rows.append({"text": text, "bare": encoded, "decoded": processor.decode(encoded)})
    write("sentencepiece-scores", {
        "pieces": [[pieces[i], processor.get_score(i), kinds[i]] for i in range(size)],
        "cases": rows, "random": random_decodes(lambda i, _: processor.decode(i), size, first=3)})

    # As tokenizer.json keeps it: the merges that the scores imply.
    merges = []
    for piece, rank in sorted(((p, i) for p, i in ids.items() if kinds[i] == 0), key=lambda r: r[1]):
        local = [(ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
                 for cut in range(1, len(piece)) if piece[:cut] in ids and piece[cut:] in ids]
        merges += [(left, right) for _, _, left, right in sorted(local)]

    def build(metaspace):
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True,
                                         byte_fallback=True))
        tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True)
                                      for s in ("<unk>", "<s>", "</s>")])
        if metaspace:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first",
                                                               split=False)
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"),
                                                         normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                               decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", ids["<s>"])])
        return tokenizer

    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    save("llama", build(False), config, decodes_at_random=False)
    save("mistral", build(True), config, decodes_at_random=False)


def default_model(path):
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds) if kind == 3])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    encode, decode = library_functions(tokenizer)
    specials = [t for t, kind in zip(tokens, kinds) if kind == 3]
    HARD.extend(specials + ["".join(specials), " ".join(specials)])
    write("default-model", {"cases": cases(encode, decode),
                            "random": random_decodes(decode, len(tokens))})


def added_tokens():
    """Every combination of an added token's flags, under each kind of normalizer: "added-..." folders."""
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    tokens = [AddedToken(f"<{bits:x}>", **{flag: bool(bits >> i & 1) for i, flag in enumerate(flags)})
              for bits in range(32)]
    # Composed and not, beginning with a space, and one within another.
    tokens += [AddedToken(text, normalized=normalized, special=False) for text, normalized in (
        ("<e\u0301>", True), ("<o\u0301>", False), ("<\u00fc>", True), ("<\u00e4>", False), (" sp", True),
        (" ps", False), ("<abc>", True), ("<ab", False), ("q", True))]
    around = ("{}", "a{}b", "a {} b", "  {}  ", "{0} {0}", "{0}{0}", "_{}1", "\u00e9{}.", "\n{}\u3000", "e\u0301 {}", ".{}x")
    texts = [form.format(token.content) for token in tokens for form in around]
    texts += ["<e\u0301><\u00e9><o\u0301><\u00f3><u\u0308><\u00fc><a\u0308><\u00e4>", "a sp ps  sp x", "<abc> <ab> <ab<abc>",
              "<1> <2><1>  <2>  <3> <0>", "x<8> <8>", "\u24b6<4>\u200d <4>\u0301 <4>-"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())

    def bytes_tokenizer(normalizer):
        tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if normalizer:
            tokenizer.normalizer = normalizer
        return tokenizer

    def pieces_tokenizer(metaspace):
        pieces = ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)] + list("\u2581abpsx<>.\u00e9\u00fc")
        tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>",
                                         fuse_unk=True, byte_fallback=True))
        if metaspace:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                                         normalizers.Replace(" ", "\u2581")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                               decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        return tokenizer

    for name, tokenizer in (("bytes", bytes_tokenizer(None)), ("nfc", bytes_tokenizer(normalizers.NFC())),
                            ("prepend", pieces_tokenizer(False)), ("metaspace", pieces_tokenizer(True))):
        tokenizer.add_tokens(tokens)
        tokenizer.add_special_tokens([token for token in tokens if token.special])
        # Where normalizing changes a special token's text, the library decodes it as if it were none.
        undecoded = [tokenizer.token_to_id(token.content) for token in tokens
                     if name == "prepend" and token.special and token.normalized]
        save(f"added-{name}", tokenizer, {}, decodes_at_random=False, texts=texts, undecoded=undecoded)


def gemma():
    """transformers' own class; with the pieces and merges of Llama's."""
    from transformers import GemmaTokenizer
    with open(f"{OUT}/llama/tokenizer.json", encoding="utf-8") as file:
        model = json.load(file)["model"]
    made = GemmaTokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]], bos_token="<s>",
                          eos_token="</s>", pad_token="<unk>", mask_token="<unk>")
    tokenizer = made.backend_tokenizer
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                                             special_tokens=[("<s>", model["vocab"]["<s>"])])
    save("gemma", tokenizer, {"bos_token": "<s>", "eos_token": "</s>"}, decodes_at_random=False)


def kimi():
    """A folder as Kimi K2's, and what tiktoken makes of it with the pattern of the authors' code."""
    import base64

    import tiktoken
    upper, lower = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]")
    ending = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    pattern = "|".join([r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}",
                        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}", r"\p{N}{1,3}",
                        r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = split(pattern)
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    spelled = {}  # GPT-2's characters of bytes
    following = 0x100
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        spelled[chr(byte if printable else following)] = byte
        following += not printable
    tokens = [bytes([byte]) for byte in range(256)]
    for merge in json.loads(trained.to_str())["model"]["merges"]:
        made = bytes(spelled[c] for c in "".join(merge))
        if made not in tokens:
            tokens.append(made)
    folder = f"{OUT}/kimi-k2"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/tiktoken.model", "wb") as file:
        for rank, token in enumerate(tokens):
            file.write(base64.b64encode(token) + b" %d\n" % rank)
    names = {len(tokens) + i: name for i, name in enumerate(["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>"])}
    names[len(tokens) + 9] = "[PAD]"
    with open(f"{folder}/tokenizer_config.json", "w", encoding="utf-8") as file:
        json.dump({"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
                   "added_tokens_decoder": {str(id): {"content": name, "special": True} for id, name in names.items()}},
                  file)
    library = tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks={t: i for i, t in enumerate(tokens)},
                                special_tokens={name: id for id, name in names.items()})

    def decode(ids, special):
        return library.decode([id for id in ids if special or id not in names])

    texts = HARD + ["中文汉字abc中", "[BOS]a[EOS]<|im_user|>b[PAD]"]
    write("kimi-k2/oracle", {"cases": cases(lambda text, _: library.encode(text, allowed_special="all"), decode, texts),
                             "random": random_decodes(decode, len(tokens))})


if sys.argv[1:] == ["added"]:
    added_tokens()
elif sys.argv[1:] == ["kimi"]:
    kimi()
elif sys.argv[1:] == ["gemma"]:
    gemma()
else:
    shutil.rmtree(OUT, ignore_errors=True)
    os.makedirs(OUT)
    byte_level_family()
    sentencepiece_family()
    gemma()
    kimi()
    added_tokens()
    default_model(sys.argv[1])
