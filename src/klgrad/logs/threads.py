"""Public threads on KL terms: what is asked, what answers it here, and which symptom it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """Threads that ask one thing.

    Attributes:
        threads: as OWNER/NAME#NUMBER, on GitHub.
        asks: the question or the report.
        answer: what answers it; where nothing does, it begins with "Not answered".
        symptoms: the names of the symptoms that it shows, if any.
    """

    threads: str
    asks: str
    answer: str
    symptoms: str = ""

    @property
    def names(self) -> list[str]:
        """The single threads: `owner/name#1, #2; owner/other#3` has three."""
        found: list[str] = []
        for part in self.threads.replace(";", ",").split(","):
            thread = part.strip()
            found.append(f"{found[-1].split('#')[0]}{thread}" if thread.startswith("#") else thread)
        return found


TOPICS = (
    Topic(
        "THUDM/slime#397, #399, #1247",
        "kl-coef is read and never used with GRPO",
        "`klgrad advise --config FILE` reads slime's scripts and lists it among the coefficients that are never read",
        "zero constant rising wiring",
    ),
    Topic(
        "THUDM/slime#1370, #1372, radixark/miles#1383, #557",
        "the KL of tool tokens leaks into the returns of earlier tokens",
        "`klgrad audit FILE:FUNCTION` changes the values at masked positions, and says if the gradient follows. What "
        "a run did is in `klgrad logs rollouts` with its mask",
        "negative",
    ),
    Topic(
        "qiancheng0/ToolRL#52",
        "the sign of the KL loss is wrong, and runs collapse",
        "`klgrad audit FILE:FUNCTION` says that it climbs",
        "rising-with-beta jump",
    ),
    Topic(
        "fla-org/flash-linear-attention#1073, #1076",
        "a GRPO loss is negated twice, and its shape tests pass",
        "`klgrad audit FILE:FUNCTION --whole`; `assert_descends` in a test",
        "rising-with-beta",
    ),
    Topic(
        "NVIDIA-NeMo/RL#2506",
        "the backward pass of k1 and k2 in GRPO",
        "`klgrad audit nemo-rl`: [its settings](frameworks/nemo-rl.md)",
        "constant",
    ),
    Topic(
        "walkinglabs/hands-on-modern-rl#27",
        "k3 with its arguments swapped",
        "`klgrad audit FILE:FUNCTION` names the divergence: half the chi-square divergence of π from ref",
        "negative",
    ),
    Topic(
        "verl-project/verl#751",
        "low_var_kl is finite forward and NaN backward",
        "[A clamp on the value](footguns.md#6-a-clamp-on-the-value-removes-the-gradient); the audit says whether a "
        "loss is finite in float32",
        "nan",
    ),
    Topic(
        "OpenRLHF/OpenRLHF#931",
        "ratios of 5e8 and KL spikes on-policy",
        "The scalars show the spike; which tokens it is takes log-probs: `klgrad logs rollouts`",
        "spike",
    ),
    Topic(
        "modelscope/ms-swift#6550",
        "the KL jumps at step 400 and all rewards fall",
        "`klgrad diagnose RUN` finds the step and the rewards beside it; why takes the configuration",
        "jump",
    ),
    Topic(
        "MakazhanAlpamys/Soup#342",
        "about half of the GRPO runs of a 7B model die with NaN",
        "The first bad step, and the causes in order; which of them takes a rollout of that step",
        "nan",
    ),
    Topic(
        "zai-org/GLM-5#34",
        "why the forward KL in on-policy distillation?",
        "[Reverse and forward](concepts.md#reverse-and-forward), [which term](which-term.md)",
    ),
    Topic(
        "verl-project/verl#6828, #6827",
        "a knob for the direction of a top-k KL",
        "`lumped_kl` has both directions, with the tail; `klgrad advise --config FILE` reads verl's distillation",
    ),
    Topic(
        "verl-project/verl#7425",
        "a reverse KL over the student's top k",
        "[Top k](kernels.md#top-k); verl's own top-k losses are audited in part: [verl's settings](frameworks/verl.md)",
        "negative",
    ),
    Topic(
        "Gen-Verse/OpenClaw-RL#4",
        "top k with a bucket for the tail beats the sampled token",
        "`lumped_kl`: [top k](kernels.md#top-k)",
    ),
    Topic(
        "radixark/miles#3292, #3136, huggingface/trl#6237",
        "each vocabulary entry of the KL capped at 0.05",
        "`klgrad audit FILE:FUNCTION` for a function over logits says what is descended; no page has this loss",
    ),
    Topic(
        "areal-project/AReaL#964",
        "distillation whose KL is k1 as a loss",
        "`klgrad advise --config FILE` reads AReaL's teacher settings and says that the teacher is ignored",
        "constant wiring",
    ),
    Topic(
        "NousResearch/atropos#464",
        "teacher data collected, and ignored in training",
        "Not answered from scalars where the trainer is not known here; two runs with different β show it",
        "constant",
    ),
    Topic(
        "pytorch/rl#4038, #3921",
        "which direction does DistillationLoss descend?",
        "`klgrad audit FILE:FUNCTION`, with a function that calls it",
    ),
    Topic(
        "pytorch/rl#4164",
        "shape tests do not tell loss variants apart",
        "`assert_descends`: [in your tests](testing.md)",
    ),
    Topic(
        "huggingface/trl#6814",
        "a parity test has β = 0, so that its KL is never compared",
        "`assert_descends`; in a log it is the first symptom",
        "zero",
    ),
    Topic(
        "erfanzar/EasyDeL#275",
        "a mix of forward and reverse KL in JAX",
        "The audit names mixes of divergences; a loss in JAX has to be written in torch for it",
    ),
    Topic(
        "unslothai/unsloth-zoo#832, #912",
        "MLX: a KL on by accident; dropout in the reference",
        "Dropout in the reference is a mismatch that `klgrad logs rollouts` measures. MLX itself is not read",
        "wiring",
    ),
    Topic(
        "ml-explore/mlx-lm#1421",
        "a first RL trainer in MLX",
        "Not answered: its settings are not read",
    ),
    Topic(
        "yifan123/flow_grpo#78, #154, #204",
        "the step Δt missing in the KL of a flow; which β; the KL as an error of the velocity",
        "Not answered: a KL between Gaussian steps is no KL between tokens",
    ),
    Topic(
        "XueZeyue/DanceGRPO#33, FrontierLabs/F5R-TTS#8",
        "is a KL needed; the policy and the reference see different noise",
        "Not answered: diffusion",
    ),
    Topic(
        "NVIDIA-NeMo/RL#3408",
        "flow GRPO",
        "Not answered: diffusion",
    ),
    Topic(
        "StarsfieldAI/R1-V#20",
        "a KL computed without the image",
        "A first batch with a KL that is not 0 shows it: the policy starts at the reference. No command reads images",
        "spike",
    ),
    Topic(
        "dllm-reasoning/d1#16",
        "β for diffusion language models, and collapse",
        "Not answered: their log-probs are no sums over a completion's tokens",
        "jump",
    ),
    Topic(
        "mlvlab/DeepVideoR1#2",
        "a β that works in GRPO collapses another objective: how to convert?",
        "A β is one for a unit, a place and an estimate: the audit's scale says what a loss multiplies it by",
        "units",
    ),
    Topic(
        "hkust-nlp/Laser#4, verl-project/verl#750",
        "both coefficients are set: is the KL applied twice?",
        "`klgrad advise --config FILE` says so, and what each of the two descends",
        "wiring",
    ),
    Topic(
        "Simplified-Reasoning/LUFFY#49, ModalMinds/MM-EUREKA#47",
        "is there a KL at all; one in the second stage only",
        "`klgrad advise --config FILE`, for each stage's file; a log without a KL is told from one whose KL is 0",
        "zero other-kl",
    ),
    Topic(
        "allenai/open-instruct#546, #642, nvidia-cosmos/cosmos-rl#321, aburkov/theLMbook#8",
        "a reference that is reset each epoch, or averaged",
        "The KL falls to 0 at each reset and is no distance from the start. No page says what a moving reference "
        "descends",
        "zero jump",
    ),
    Topic(
        "huggingface/trl#4309",
        "does LoRA use the base model as the reference?",
        "[The KL of any run](callback.md)",
        "zero",
    ),
    Topic(
        "huggingface/trl#5117, #5956, allenai/open-instruct#1733, #1755",
        "a divergence to the sampler as a mask",
        "[Whole policy losses](policy-losses.md); in a log such a KL is told from that to the reference",
        "other-kl",
    ),
    Topic(
        "PrimeIntellect-ai/prime-rl#2458, #2187, #1701",
        "a KL on masked or on kept tokens; squared or not",
        "`klgrad audit FILE:FUNCTION --whole`; `klgrad advise --config FILE` reads prime-rl's files",
        "other-kl",
    ),
    Topic(
        "NVIDIA-NeMo/labs-molt#116",
        "gates by a binary KL at the level of tokens or sequences",
        "Not answered for its own settings; a function of one's own can be audited with --whole",
    ),
    Topic(
        "PrimeIntellect-ai/prime-rl#2808, NVIDIA/Megatron-LM#4168, modelscope/ms-swift#9579, NVIDIA/TensorRT-LLM#18397",
        "router replay: trainer and sampler choose other experts",
        "`klgrad logs rollouts` measures the mismatch, and cannot name the routing as its cause",
        "spike negative",
    ),
    Topic(
        "verl-project/verl#4544",
        "masks of whole sequences by k1 or k3 to the sampler",
        "[Whole policy losses](policy-losses.md)",
        "other-kl",
    ),
    Topic(
        "fw-ai/cookbook#430, modelscope/ms-swift#7145",
        "ppo_kl is not the KL to the reference; the direction of a mismatch KL",
        "`klgrad diagnose RUN` leaves such names out, and says so",
        "other-kl",
    ),
    Topic(
        "NVIDIA-NeMo/RL#1349",
        "a recipe needs k2",
        "`klgrad audit nemo-rl`: [its settings](frameworks/nemo-rl.md)",
    ),
    Topic(
        "ray-project/ray#61562, #61782",
        "use_kl_loss is ignored in RLlib's PPO",
        "Two runs with different β show it. RLlib's own settings are not read",
        "constant",
    ),
    Topic(
        "Proteusiq/unthinking#88",
        "a baseline without a KL beside a teacher that is an average",
        "`klgrad diagnose RUN` tells a log without a KL; what a moving teacher descends is not answered",
        "zero",
    ),
    Topic(
        "open-thought/tiny-grpo#5, SakanaAI/self-adaptive-llms#5, McGill-NLP/VinePPO#14",
        "a mask applied twice; a sampled or a full KL; a KL in value estimates",
        "[Token and sequence](concepts.md#token-and-sequence); `klgrad audit FILE:FUNCTION`",
        "units",
    ),
    Topic(
        "paiml/aprender#2153",
        "a loss in Rust with another direction than its own gradient",
        "Not answered: only Python is called",
    ),
    Topic(
        "one-covenant/grail#42",
        "k2 as a loss is called a bug",
        "It is none: [k2 as a loss](zoo/k2-loss.md) descends the reverse KL",
    ),
    Topic(
        "kfallah/CLaaS#1, NVIDIA-NeMo/labs-molt#21, huggingface/trl#3939",
        "tricks of self-distillation; an adaptive target; the reference as data",
        "`kl_target` of KLConfig is [documented](train.md); the others are not answered",
        "rising",
    ),
)


def threads_of(symptom: str) -> list[str]:
    """The threads that show a symptom."""
    return [name for topic in TOPICS if symptom in topic.symptoms.split() for name in topic.names]


def link(thread: str) -> str:
    """Its address; GitHub leads from an issue's to a pull request's."""
    repository, _, number = thread.partition("#")
    return f"https://github.com/{repository}/issues/{number}"
