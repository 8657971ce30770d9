"""Makes demonstrations, a tokenizer and a random model from nothing: a folder that sft.py then trains to models/tiny.

    python models/tiny/make.py --output-dir FOLDER
    python sft.py --model FOLDER --data FOLDER/demonstrations/* --learning-rate 3e-3 --num-steps 2400

README.md has the commands that made the weights in this folder.
The tokenizer is trained on the demonstrations that the model learns to write.
"""

import itertools
import json
import os
import sys
from dataclasses import dataclass, field

import tokenizers
import torch
import transformers
import tyro
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
import envs

# Environment, agents, turns and options of each source; a file each, and an equal share of the training.
SOURCES = [
    *["tldr 1 1", "tldr 2 1", "tldr 2 1", "tldr 3 1"],
    *["tldr 2 1 protocol sequential", "tldr 2 1 protocol discussion"],
    *["arxiv 1 1", "arxiv 2 1", "arxiv 2 1"],
    *["humaneval 1 2", "humaneval 2 2", "humaneval 2 2", "humaneval 3 2"],
    *["humaneval 2 1 protocol sequential", "humaneval 2 1 protocol discussion"],
    *["classeval 1 2", "classeval 2 2", "classeval 3 2"],
    *["gsm8k 1 2", "gsm8k 2 2", "gsm8k 2 2", "gsm8k 3 2"],
    *["debate 1 2", "debate 2 2", "debate 2 2", "debate 3 2", "debate 3 2 form judge"],
    *["tools 1 3", "tools 2 3", "tools 2 3", "tools 3 4"],
    *["bfcl 1 1", "bfcl 2 1", "bfcl 2 1", "bfcl 3 1"],
    *["bugfix 1 1", "bugfix 2 2", "bugfix 2 2", "bugfix 3 3"],
    *["reference 2 2", "reference 2 2", "reference 3 2"],
    *["mbpp 2 1", "classeval 2 3 deal choose", "humaneval 2 2 feedback code", "humaneval 2 2 feedback code"],
    *["coophumaneval 2 2 feedback code"] * 6,
]
# Of these only later turns are shown, in which it matters what the partner wrote, or only the first, in which agents
# choose: to write these functions and classes is left to be learned.
LATER_TURNS = ["coophumaneval 2 2 feedback code"]
FIRST_TURNS = ["classeval 2 3 deal choose"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass
class Args:
    output_dir: str  # the folder to write
    seed: int = 1  # seeds the weights and the environments, each with another
    sources: list[str] = field(default_factory=lambda: SOURCES)

    # model
    vocab_size: int = 2048  # tokens of the byte-level BPE, fewer if the texts have no more to merge; at least 259
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4  # attention heads, half as many for keys and values


def new_tokenizer(texts, vocab_size):
    """Byte-level BPE with ChatML messages. Pad and stop token differ, so no mask can confuse them."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    # exactly Qwen2's: transformers loads a Qwen2 model's tokenizer with these, whatever was saved
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN2_WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(itertools.chain(texts, ["user\n", "assistant\n"] * 100), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model(args, tokenizer):
    """A Qwen2 with random weights."""
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=max(1, args.num_heads // 2),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    transformers.set_seed(args.seed)
    folder = os.path.join(args.output_dir, "demonstrations")
    os.makedirs(folder)
    texts = []
    for k, source in enumerate(args.sources):
        name, num_agents, num_turns, *options = source.split()
        options = dict(zip(options[::2], options[1::2]))
        env = envs.make(name, int(num_agents), int(num_turns), seed=args.seed + 1000 * k, **options)
        pairs = env.demonstrations()
        if source in LATER_TURNS + FIRST_TURNS:
            first_prompts = {prompt for task in env.tasks("train") for prompt in env.observe(task, [])}
            pairs = [pair for pair in pairs if (pair["prompt"] in first_prompts) == (source in FIRST_TURNS)]
        with open(os.path.join(folder, f"{k:02}-{name.replace(':', '.')}.jsonl"), "w") as file:
            for pair in pairs:
                file.write(json.dumps(pair) + "\n")
                texts += pair.values()
    tokenizer = new_tokenizer(texts, args.vocab_size)
    model = new_model(args, tokenizer)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M random parameters in {args.output_dir}")
