"""The adapters of Hugging Face's peft on BERT and Llama, measured like the classes of transformers."""

from typing import Any

from torch import nn

from benchmarks import zoo_transformers

BASES = {"BertForSequenceClassification": "SEQ_CLS", "LlamaForCausalLM": "CAUSAL_LM"}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {  # type: ignore[explicit-any]
    "LoRA": ("LoraConfig", {"r": 2, "init_lora_weights": False}),
    "LoRA of all layers": ("LoraConfig", {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}),
    "rsLoRA": ("LoraConfig", {"r": 2, "use_rslora": True, "init_lora_weights": False}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, "init_lora_weights": False}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 2, "total_step": 10, "init_lora_weights": False}),
    "LoHa": ("LoHaConfig", {"r": 2, "target_modules": "all-linear", "init_weights": False}),
    "LoKr": ("LoKrConfig", {"r": 2, "target_modules": "all-linear", "init_weights": False}),
    "VeRA": ("VeraConfig", {"r": 2, "init_weights": False}),
    "IA3": ("IA3Config", {}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
}


def names() -> list[str]:
    """Return the names of all adapters with their base."""
    return [f"{base}, {adapter}" for base in BASES for adapter in ADAPTERS]


def measure(name: str) -> dict[str, object]:
    """Analyse an adapted model as its users train it, and compare its recovered gradients with those of autograd."""
    base, _, adapter = name.partition(", ")

    def adapt(model: nn.Module) -> nn.Module:
        import peft

        kind, settings = ADAPTERS[adapter]
        adapted: nn.Module = peft.get_peft_model(model, getattr(peft, kind)(task_type=BASES[base], **settings))
        return adapted.train()

    return zoo_transformers.measure(base, adapt)
