"""As many scripts are written: arguments, a dictionary, a constant. It is read, and never run."""
# ruff: noqa
# pyright: basic, reportMissingImports=false, reportUndefinedVariable=false, reportPrivateImportUsage=false

import argparse

from trl import GRPOConfig, GRPOTrainer

ITERATIONS = 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--beta", type=float, default=0.04)
    parser.add_argument("--lr", type=float, required=True)
    options = parser.parse_args()
    common = {"loss_type": "dr_grpo", "use_bias_correction_kl": False}
    common["use_vllm"] = True
    args = GRPOConfig("out", beta=options.beta, num_iterations=ITERATIONS, learning_rate=options.lr, **common)
    args.steps_per_generation = 4
    scheduler = Schedule()
    scheduler.beta = 0.0
    GRPOTrainer("some/model", args=args).train()


main()
