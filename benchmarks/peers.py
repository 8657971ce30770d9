"""The trainers of comlrl and trl, with the settings of a job; what throughput.py and gpu.py run as a process.

    pip install comlrl==1.4.3 trl==1.16.0
    python benchmarks/throughput.py --baseline comlrl    (or trl: it runs `python benchmarks/peers.py trl`)

Both use the prompts unchanged, and update as often as the job says. When each update ends, and how many completion
tokens it had, is noted.
"""

import sys
from itertools import pairwise

import stamp  # noqa: F401, finds envs
import transformers
from datasets import Dataset
from timed import read_clock, read_job, score, write_result
from transformers import PreTrainedTokenizerFast


def make_comlrl_arguments(job):
    """Arguments of comlrl's MAGRPOTrainer, for two agents that are copies of one model."""
    from comlrl.trainers.reinforce import MAGRPOConfig

    config = MAGRPOConfig(
        num_train_epochs=1,
        num_turns=1,
        agent_learning_rate=job["learning_rate"],
        num_generations=job["num_generations"],
        max_new_tokens=job["completion_tokens"],
        agent_devices=job["device"],
        eval_interval=0,
        # a buffer of B prompts (with their G completions) for each agent, trained in one piece: one optimizer step
        rollout_buffer_size=job["num_tasks"],
        # what our scripts compute
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        advantage_normalization=False,
    )
    # it has no mixed precision: on a GPU the weights themselves are bfloat16, its fastest option
    dtype = "bfloat16" if job["device"] == "cuda" else "float32"
    return {
        "num_agents": 2,
        "agent_model": job["model"],
        "model_config": {"torch_dtype": dtype},
        "tokenizer": PreTrainedTokenizerFast.from_pretrained(job["model"]),
        "args": config,
    }


def make_trl_arguments(job):
    """Arguments of trl's GRPOTrainer."""
    from trl import GRPOConfig

    cuda = job["device"] == "cuda"
    config = GRPOConfig(
        max_steps=job["updates"],
        # one optimizer step per rollout, which is sampled and trained in one batch
        per_device_train_batch_size=job["num_tasks"] * job["num_generations"],
        num_generations=job["num_generations"],
        max_completion_length=job["completion_tokens"],
        # decays linearly and gradients are clipped to 1, as ours
        learning_rate=job["learning_rate"],
        # what our scripts compute
        loss_type="dr_grpo",
        scale_rewards="none",
        shuffle_dataset=False,
        seed=job["seed"],
        # on by default, and slower
        gradient_checkpointing=False,
        # autocast over float32 weights, and TF32, as ours; bf16 is on by default, even on a CPU
        bf16=cuda,
        tf32=True if cuda else None,
        use_cpu=not cuda,
        model_init_kwargs={"dtype": "float32"},
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        output_dir=job["folder"],
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    return {"model": job["model"], "processing_class": tokenizer, "args": config}


ends = []  # of each update
tokens = [0]  # of completions, of each update; the last one runs


def end_update(*_):
    ends.append(read_clock())
    tokens.append(0)


def train_comlrl(job, tasks):
    from comlrl.trainers.reinforce import MAGRPOTrainer

    class Counted(MAGRPOTrainer):
        def _generate_completions(self, *args, **kwargs):
            data = super()._generate_completions(*args, **kwargs)
            tokens[-1] += sum(data["response_lens"])
            return data

    def reward(*completions):
        """One list of texts per agent, aligned; a number for each joint action."""
        return [score(texts) for texts in zip(*completions)]

    trainer = Counted(reward_func=reward, train_dataset=tasks, **make_comlrl_arguments(job))
    trainer.verbose = False
    # the last agent's step ends an update
    trainer.optimizers[-1].register_step_post_hook(end_update)
    trainer.train()


def train_trl(job, tasks):
    from trl import GRPOTrainer

    class Ticker(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            end_update()

    def reward(prompts, completions, completion_ids, **_):
        tokens[-1] += sum(map(len, completion_ids))
        return [score([text]) for text in completions]

    arguments = make_trl_arguments(job)
    GRPOTrainer(reward_funcs=reward, train_dataset=tasks, callbacks=[Ticker()], **arguments).train()


if __name__ == "__main__":
    job = read_job()
    job["updates"] += 1  # the first one warms up
    transformers.set_seed(job["seed"])
    # of all updates, each used once, in the chat template of workloads.py
    prompts = [f"<|im_start|>{prompt}<|im_end|><|im_start|>" for prompt in job["prompts"][:-1]]
    tasks = Dataset.from_dict({"prompt": prompts})
    {"comlrl": train_comlrl, "trl": train_trl}[sys.argv[1]](job, tasks)
    if len(ends) != job["updates"]:
        sys.exit(f"{len(ends)} updates were made, not {job['updates']}")
    write_result(iteration_s=[end - start for start, end in pairwise(ends)], tokens=tokens[1:-1])
