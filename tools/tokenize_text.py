#!/usr/bin/env python3
"""Makes examples for examples/finetune --rows, with the tokenizer of a Hugging Face model:

    tools/python.sh tools/tokenize_text.py ./gpt2 train-v2.0.json rows.safetensors --length 64    SQuAD: its contexts
    tools/python.sh tools/tokenize_text.py ./gpt2 text.txt rows.safetensors                       a line, an example
    tools/python.sh tools/tokenize_text.py ./gpt2 --decode 464 2068 7586                          ids to text

Pads and cuts each to --length; padding has attention_mask 0 and labels -100, which transformers' losses ignore.
"""

import argparse
import json
import pathlib
import sys

try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"tokenize_text.py: {error}; call it as tools/python.sh tools/tokenize_text.py ..., which has what it needs")


def texts_of(file):
    if file.suffix != ".json":
        return [line for line in file.read_text().splitlines() if line.strip()]
    articles = json.loads(file.read_text())["data"]
    return [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]


def rows_of(tokenizer, texts, length):
    if tokenizer.pad_token is None:  # GPT-2 has none
        tokenizer.pad_token = tokenizer.eos_token
    rows = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids, mask = rows["input_ids"].contiguous(), rows["attention_mask"].contiguous()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a folder with tokenizer.json, or a name on the hub")
    parser.add_argument("text", nargs="?", type=pathlib.Path, help="lines of text, or SQuAD's JSON")
    parser.add_argument("rows", nargs="?", help="the file to write, *.safetensors")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--decode", type=int, nargs="+", metavar="ID")
    arguments = parser.parse_args()
    if (arguments.decode is None) == (arguments.rows is None):
        parser.error("give a text and the file to write, or --decode")
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    if arguments.decode is not None:
        print(tokenizer.decode(arguments.decode))
        return
    texts = texts_of(arguments.text)
    if not texts:
        sys.exit(f"tokenize_text.py: {arguments.text} has no text")
    rows = rows_of(tokenizer, texts, arguments.length)
    save_file(rows, arguments.rows)
    print(f"{len(texts)} examples of {arguments.length} tokens, {int(rows['attention_mask'].sum())} without padding")


if __name__ == "__main__":
    main()
