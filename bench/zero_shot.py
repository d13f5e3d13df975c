#!/usr/bin/env python3
"""Zero-shot accuracy of a model in several weight formats, by lm-eval on the OpenAI endpoint, with standard errors.

usage: bench/zero_shot.py MODEL [--formats bf16,int8,...] [--samples N] [--out FOLDER] [--text FILE] [--treadle PROGRAM]

last word   a sentence without its last word, which the model must give greedily (as LAMBADA asks): accuracy, and the
            perplexity of the word
next        one of four sentences follows the first, the others are from elsewhere in the text (as HellaSwag asks):
            accuracy by the likelihood, and by that per byte (normalized)

Sentences are those of bench/fetch_text.sh's text, the Debian Administrator's Handbook, drawn with a fixed seed: the
same for every format. Run it with a PATH and PYTHONPATH that have lm-eval (tests/clients/evaluations_requirements.txt
has the version). Formats are of matrices of linear layers, made from what MODEL holds. A change is paired: its standard
error is that of the answers that differ.
"""
import argparse, json, math, os, pathlib, random, re, shutil, socket, subprocess, sys, tempfile, time, urllib.request

TASKS = {"last_word": """output_type: loglikelihood
doc_to_target: " {{word}}"
metric_list: [{metric: acc}, {metric: perplexity}]
""", "next": """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""}
HEAD = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
"""
FORMATS = "bf16,int8,nf4,fp4,kbit-int4:64,kbit-float4e2:64"


def sentences(text):
    """Pairs of sentences that follow each other in a paragraph, each of 8 to 40 words that are plain."""
    pairs = []
    for paragraph in text.split("\n"):
        found = re.split(r"(?<=[a-z]\.) (?=[A-Z])", paragraph)
        good = [8 <= len(each.split()) <= 40 and re.fullmatch(r"[A-Za-z0-9 ,.;:'()\-]+", each) is not None for each in found]
        pairs += [(found[i], found[i + 1]) for i in range(len(found) - 1) if good[i] and good[i + 1]]
    return pairs


def questions(text, samples):
    draw = random.Random(1)
    pairs = sentences(text)
    others = [second for _, second in pairs]
    draw.shuffle(pairs)
    last_word, following = [], []
    for first, second in pairs:
        words = second.rstrip(".").split()
        if words[-1].isalpha() and len(words[-1]) > 2:
            last_word.append({"context": f"{first} {' '.join(words[:-1])}", "word": words[-1]})
        choices = [second, *draw.sample([other for other in others if other != second], 3)]
        draw.shuffle(choices)
        following.append({"context": first, "choices": [f" {choice}" for choice in choices], "answer": choices.index(second)})
    return {"last_word": last_word[:samples], "next": following[:samples]}


def evaluate(options, weights, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [options.treadle, "serve", "--model", options.model, "--weights", weights, "--listen", "127.0.0.1:0",
             "--http-listen", f"127.0.0.1:{port}", "--metrics-listen", "none", "--log-requests", "off",
             "--max-batch-size", "16", "--max-batch-tokens", "512"]
    log = open(folder / f"serve-{weights}.log", "w")
    server = subprocess.Popen(serve, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        for _ in range(600):
            try:
                model = json.load(urllib.request.urlopen(f"{url}/models"))["data"][0]["id"]
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit(f"{' '.join(serve)}: ended; {pathlib.Path(log.name).read_text()[-500:]}")
                time.sleep(0.2)
        else:
            sys.exit(f"{' '.join(serve)}: does not serve")
        command = ["lm_eval", "run", "--model", "local-completions", "--model_args",
                   f"model={model},base_url={url}/completions,num_concurrent=16,max_retries=9,timeout=3600,"
                   "tokenizer_backend=remote,tokenized_requests=False", "--include_path", ".", "--tasks", ",".join(TASKS), "--batch_size", "1",
                   "--output_path", f"out-{weights}", "--log_samples"]
        environment = os.environ | {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                                    "HF_HOME": str(folder / "hub")}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}:\n{(done.stdout + done.stderr)}")
    finally:
        server.terminate()
        server.wait()
    (report,) = folder.glob(f"out-{weights}/**/results_*.json")
    right = {}
    for task in TASKS:
        (samples,) = folder.glob(f"out-{weights}/**/samples_{task}_*.jsonl")
        entries = [json.loads(line) for line in samples.read_text().splitlines()]
        right[task] = {entry["doc_id"]: float(entry["acc"]) for entry in entries}
    return json.loads(report.read_text())["results"], right


def paired(ours, base):
    """The difference of two accuracies on the same questions, and its standard error."""
    differences = [ours[question] - base[question] for question in base]
    mean = sum(differences) / len(differences)
    variance = sum((each - mean) ** 2 for each in differences) / (len(differences) - 1)
    return mean, math.sqrt(variance / len(differences))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = pathlib.Path(__file__).resolve().parent
    parser.add_argument("model")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=FORMATS.split(","))
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--treadle", default=str(here.parent / "build/treadle"))
    options = parser.parse_args()
    if shutil.which("lm_eval") is None:
        sys.exit("bench/zero_shot.py: no lm_eval in PATH: pip install 'lm-eval[api]'")
    options.model, options.treadle = (str(pathlib.Path(path).resolve()) for path in (options.model, options.treadle))
    text = options.text or pathlib.Path(subprocess.check_output([here / "fetch_text.sh"], text=True).strip())
    asked = questions(text.read_text(), options.samples)
    folder = options.out or pathlib.Path(tempfile.mkdtemp(prefix="zero_shot."))
    folder.mkdir(parents=True, exist_ok=True)
    for name, rest in TASKS.items():
        (folder / f"{name}.yaml").write_text(HEAD.format(name=name) + rest)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in asked[name]))
    print(f"{pathlib.Path(options.model).name}, " + ", ".join(f"{name}: {len(entries)}" for name, entries in asked.items()))
    print("\n| weights | last word, % | change | perplexity | next, % | change | next, normalized, % |\n|---|---|---|---|---|---|---|")
    base = None
    for weights in options.formats:
        results, right = evaluate(options, weights, folder)
        base = base or right
        percent = lambda task, metric: (f"{100 * results[task][f'{metric},none']:.1f} ± "
                                        f"{100 * float(results[task][f'{metric}_stderr,none']):.1f}")
        change = {task: "" if right is base else "{:+.1f} ± {:.1f}".format(*(100 * x for x in paired(right[task], base[task])))
                  for task in TASKS}
        print(f"| {weights} | {percent('last_word', 'acc')} | {change['last_word']} | "
              f"{results['last_word']['perplexity,none']:.2f} | {percent('next', 'acc')} | {change['next']} | "
              f"{percent('next', 'acc_norm')} |", flush=True)
    print(f"\nAnswers are in {folder}.")


if __name__ == "__main__":
    main()
