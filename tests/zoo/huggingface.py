"""Models of Hugging Face transformers, made from tiny configurations; nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.specimen import (
    CLASSES,
    LENGTH,
    WORDS,
    Client,
    Specimen,
    classes,
    clients,
    images,
    padded,
    texts,
    token_accuracy,
    token_cross_entropy,
    words,
)

BERT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": LENGTH + 2,
    "num_labels": CLASSES,
}
GPT2: dict[str, Any] = {
    "vocab_size": WORDS,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "num_labels": CLASSES,
}
LLAMA: dict[str, Any] = BERT | {"num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 0}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**BERT))  # type: ignore[no-untyped-call]


def bert_lora() -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, lora_dropout=0.1, target_modules=["query", "value"])
    return get_peft_model(bert(), lora)


def roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(RobertaConfig(**BERT, pad_token_id=0))  # type: ignore[no-untyped-call]


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(  # type: ignore[call-arg]
        vocab_size=WORDS,
        dim=8,
        n_layers=1,
        n_heads=2,
        hidden_dim=12,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
    )
    return DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**GPT2))  # type: ignore[no-untyped-call]


def gpt2_classifier() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(GPT2Config(**GPT2, pad_token_id=0))  # type: ignore[no-untyped-call]


def gpt2_lora() -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(gpt2(), lora)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA))  # type: ignore[no-untyped-call]


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg]
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


def masked(n: int, g: torch.Generator) -> Client:
    ids, mask = padded(n, g)
    return {"input_ids": ids, "attention_mask": mask.long()}, classes(n, g)


def sentences(n: int, g: torch.Generator) -> Client:
    ids = words(n, g)
    return ids, ids


def shifted(measure: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Compares the logits at each word with the next word."""

    def measured(outputs: Any, targets: Tensor) -> Tensor:
        logits: Tensor = getattr(outputs, "logits", outputs)
        return measure(logits[:, :-1], targets[:, 1:])

    return measured


next_word_loss, next_word_accuracy = shifted(token_cross_entropy), shifted(token_accuracy)


def classifier(name: str, model: Callable[[], nn.Module], *needs: str) -> Specimen:
    return Specimen(name, model, clients(masked), needs=("transformers", *needs))


def language_model(name: str, model: Callable[[], nn.Module], *needs: str) -> Specimen:
    needs = "transformers", *needs
    return Specimen(name, model, clients(sentences), next_word_loss, next_word_accuracy, needs=needs)


SPECIMENS = [
    classifier("bert", bert),
    Specimen("bert-unpadded", bert, texts, needs=("transformers",)),
    classifier("bert-lora", bert_lora, "peft"),
    classifier("roberta", roberta),
    classifier("distilbert", distilbert),
    classifier("gpt2-classifier", gpt2_classifier),
    language_model("gpt2", gpt2),
    language_model("gpt2-lora", gpt2_lora, "peft"),
    language_model("llama", llama),
    Specimen("vit", vit, images(1, 8, 8), needs=("transformers",)),
]
