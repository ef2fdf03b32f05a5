"""Small random models of Hugging Face transformers, one a family, with the data that they train on.

Nothing is downloaded: every model is built from its configuration class. Dropout is on wherever a configuration has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

VOCAB, LENGTH, ROWS = 40, 12, 2

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """How a model is made and fed.

    Attributes:
        model: the name of a class of transformers.
        config: the arguments of its configuration.
        batch: makes a batch; the generator is seeded.
        labels: makes the labels that the model computes its loss from; None if it computes none.
        prepare: changes the new model (freezes parameters, for instance).
        keywords: other arguments of the model, constants.
    """

    model: str
    config: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]
    labels: Callable[[torch.Generator], Batch] | None = None
    prepare: Callable[[Any], Any] = field(default=lambda model: None)
    keywords: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """The model in train mode, the same every time."""
        import transformers

        torch.manual_seed(1)
        kind = getattr(transformers, self.model)
        model = kind(kind.config_class(**self.config))
        for part in model.modules():
            if hasattr(part, "config"):
                part.config.use_cache = False  # what is returned holds tensors only
        self.prepare(model)
        return model.train()


def tokens(g: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    # The lowest numbers are often special tokens: padding, ends, images.
    return torch.randint(5, VOCAB, (ROWS, length), generator=g)


def text(g: torch.Generator) -> Batch:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, LENGTH - 3 :] = 0
    return {"input_ids": tokens(g), "attention_mask": mask}


def unmasked(g: torch.Generator) -> Batch:
    return {"input_ids": tokens(g)}


def pair(g: torch.Generator) -> Batch:
    return {**text(g), "decoder_input_ids": tokens(g, 7)}


def pictures(size: int = 16) -> Callable[[torch.Generator], Batch]:
    return lambda g: {"pixel_values": torch.randn(ROWS, 3, size, size, generator=g)}


def sound(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(ROWS, 400, generator=g)}


def spectrogram(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(ROWS, 8, 40, generator=g), "decoder_input_ids": tokens(g, 7)}


def classes(g: torch.Generator) -> Batch:
    return {"labels": torch.randint(3, (ROWS,), generator=g)}


def next_tokens(g: torch.Generator) -> Batch:
    return {"labels": tokens(g)}


def answers(g: torch.Generator) -> Batch:
    return {"labels": tokens(g, 7)}


def spans(g: torch.Generator) -> Batch:
    start = torch.randint(LENGTH // 2, (ROWS,), generator=g)
    return {"start_positions": start, "end_positions": start + 3}


_SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
_ENCODER = {**_SIZES, **_DROPOUT, "intermediate_size": 24, "max_position_embeddings": 32, "num_labels": 3,
            "pad_token_id": 0}  # fmt: skip
_DECODER = {**_SIZES, "intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 32,
            "attention_dropout": 0.2, "pad_token_id": 0}  # fmt: skip
_SEQ2SEQ = {"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.2,
            "attention_dropout": 0.2, "max_position_embeddings": 32, "pad_token_id": 1}  # fmt: skip
_VISION = {"image_size": 16, "patch_size": 8, "num_channels": 3, "hidden_size": 16, "num_hidden_layers": 2,
           "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 3, **_DROPOUT}  # fmt: skip
_SPEECH = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
           "intermediate_size": 24, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2),
           "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
           "mask_time_prob": 0.0, "layerdrop": 0.0, "hidden_dropout": 0.2, "attention_dropout": 0.2, "num_labels": 3,
           "classifier_proj_size": 8}  # fmt: skip


def freeze_embeddings(model: Any) -> None:
    model.get_input_embeddings().requires_grad_(False)


def freeze_features(model: Any) -> None:
    model.freeze_feature_encoder()


FAMILIES: dict[str, Family] = {
    "BERT": Family("BertForSequenceClassification", _ENCODER, text, classes),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.2},
        text,
        next_tokens,
    ),
    "Llama": Family("LlamaForCausalLM", _DECODER, text, next_tokens, freeze_embeddings),
    "BLOOM": Family(
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.2,
         "attention_dropout": 0.2},
        text,
        next_tokens,
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
         "dropout_rate": 0.2, "decoder_start_token_id": 0},
        text,
        answers,
    ),
    "BART": Family("BartForConditionalGeneration", _SEQ2SEQ, text, answers),
    "ViT": Family("ViTForImageClassification", _VISION, pictures(), classes),
    "ConvNeXt": Family(
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "drop_path_rate": 0.2},
        pictures(32),
        classes,
    ),
    "ResNet": Family(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
        pictures(32),
        classes,
    ),
    "Wav2Vec2": Family("Wav2Vec2ForSequenceClassification", _SPEECH, sound, classes, freeze_features),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16,
         "decoder_start_token_id": 2, "eos_token_id": 3, "bos_token_id": 2},
        spectrogram,
        answers,
    ),
    "Mamba": Family(
        "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_cache": False},
        unmasked,
        next_tokens,
    ),
    "Mixtral": Family(
        "MixtralForCausalLM",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        text,
        next_tokens,
    ),
    "DeBERTa-v2": Family(
        "DebertaV2ForSequenceClassification",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
         "problem_type": "single_label_classification"},
        text,
        classes,
    ),
}  # fmt: skip

# What torch cannot trace, and so does fdp not: each with the line that its refusal names.
REFUSED: dict[str, tuple[Family, str]] = {
    "DeBERTa-v2 without problem_type": (
        Family("DebertaV2ForSequenceClassification", _ENCODER, text, classes), "modeling_deberta_v2.py"
    ),
    "I-BERT": (Family("IBertForSequenceClassification", {**_ENCODER, "quant_mode": False}, text, classes),
               "quant_modules.py"),
    "XLM": (Family("XLMWithLMHeadModel", {"vocab_size": VOCAB, "emb_dim": 16, "n_layers": 2, "n_heads": 2,
            "max_position_embeddings": 32}, text, next_tokens), "modeling_xlm.py"),
    "Longformer": (Family("LongformerForMaskedLM", {**_ENCODER, "attention_window": [4, 4]}, text, next_tokens),
                   "modeling_longformer.py"),
    "LED": (Family("LEDForConditionalGeneration", {**_SEQ2SEQ, "attention_window": 4,
            "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32,
            "decoder_start_token_id": 2}, text, answers), "modeling_led.py"),
    "ProphetNet with labels": (Family("ProphetNetForConditionalGeneration", {"vocab_size": VOCAB, "hidden_size": 16,
                         "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_encoder_layers": 1,
                         "num_decoder_layers": 1, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2,
                         "max_position_embeddings": 32}, text, answers), "modeling_prophetnet.py"),
    "Switch": (Family("SwitchTransformersForConditionalGeneration", {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8,
               "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "num_experts": 2,
               "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0},
               text, answers), "modeling_switch_transformers.py"),
    "Wav2Vec2 with CTC": (Family("Wav2Vec2ForCTC", {**_SPEECH, "pad_token_id": 0}, sound, answers),
                          "modeling_wav2vec2.py"),
    # The line that cannot be traced is a backward one, which torch does not tell.
    "Wav2Vec2 with masks": (Family("Wav2Vec2ForSequenceClassification", {**_SPEECH, "mask_time_prob": 0.4,
                            "mask_time_length": 2}, sound, classes), "test_huggingface.py"),
    "Wav2Vec2 with layers dropped": (Family("Wav2Vec2ForSequenceClassification", {**_SPEECH, "layerdrop": 0.5}, sound,
                                     classes), "modeling_wav2vec2.py"),
}  # fmt: skip

MORE: dict[str, Family] = {
    "RoBERTa": Family("RobertaForSequenceClassification", {**_ENCODER, "pad_token_id": 1}, text, classes),
    "ALBERT": Family("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 8}, text, next_tokens),
    "ELECTRA": Family("ElectraForPreTraining", {**_ENCODER, "embedding_size": 8}, text),
    "DistilBERT": Family(
        "DistilBertForQuestionAnswering",
        {"vocab_size": VOCAB, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 32},
        text,
        spans,
    ),
    "ModernBERT": Family("ModernBertForMaskedLM", {**_ENCODER, "attention_dropout": 0.2, "mlp_dropout": 0.2,
                         "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}, text,
                         next_tokens),
    "MPNet": Family("MPNetForMaskedLM", {**_ENCODER, "pad_token_id": 1}, text, next_tokens),
    "ConvBERT": Family("ConvBertForSequenceClassification", {**_ENCODER, "embedding_size": 16}, text, classes),
    "RoFormer": Family("RoFormerForMaskedLM", {**_ENCODER, "embedding_size": 16}, text, next_tokens),
    "FNet": Family("FNetForMaskedLM", {**_ENCODER, "use_tpu_fourier_optimizations": False}, unmasked, next_tokens),
    "MobileBERT": Family("MobileBertForMaskedLM", {**_ENCODER, "embedding_size": 8, "intra_bottleneck_size": 8},
                         text, next_tokens),
    "SqueezeBERT": Family("SqueezeBertForMaskedLM", {**_ENCODER, "embedding_size": 16, "q_groups": 2, "k_groups": 2,
                          "v_groups": 2, "post_attention_groups": 1, "intermediate_groups": 2, "output_groups": 2},
                          text, next_tokens),
    "Funnel": Family("FunnelForMaskedLM", {"vocab_size": VOCAB, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24,
                     "block_sizes": [1, 1], "num_decoder_layers": 1}, text, next_tokens),
    "XLNet": Family("XLNetLMHeadModel", {"vocab_size": VOCAB, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
                    text, next_tokens),
    "BigBird": Family("BigBirdForMaskedLM", {**_ENCODER, "attention_type": "original_full"}, text, next_tokens),
    "CANINE": Family("CanineForSequenceClassification", {**_ENCODER, "num_hash_buckets": 16, "num_hash_functions": 2,
                     "local_transformer_stride": 4, "downsampling_rate": 4}, text, classes),
    "OPT": Family("OPTForCausalLM", {**_SIZES, "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16,
                  "dropout": 0.2}, text, next_tokens),
    "GPT-Neo": Family("GPTNeoForCausalLM", {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "num_heads": 2,
                      "attention_types": [[["global", "local"], 1]], "window_size": 4, "resid_dropout": 0.2,
                      "max_position_embeddings": 32}, text, next_tokens),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", {**_SIZES, "intermediate_size": 24, "hidden_dropout": 0.2}, text,
                       next_tokens),
    "GPT-J": Family("GPTJForCausalLM", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4,
                    "n_positions": 32, "resid_pdrop": 0.2}, text, next_tokens),
    "CodeGen": Family("CodeGenForCausalLM", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4,
                      "rotary_dim": 4, "n_positions": 32, "resid_pdrop": 0.2}, text, next_tokens),
    "CTRL": Family("CTRLLMHeadModel", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 24,
                   "n_positions": 32}, text, next_tokens),
    "GPTBigCode": Family("GPTBigCodeForCausalLM", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2,
                         "n_positions": 32}, text, next_tokens),
    "Mistral": Family("MistralForCausalLM", {**_DECODER, "sliding_window": 4}, text, next_tokens),
    "Qwen2": Family("Qwen2ForCausalLM", _DECODER, text, next_tokens),
    "Qwen3": Family("Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}, text, next_tokens),
    "Qwen2-MoE": Family("Qwen2MoeForCausalLM", {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2,
                        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}, text, next_tokens),
    "Gemma": Family("GemmaForCausalLM", {**_DECODER, "head_dim": 8}, text, next_tokens),
    "Gemma 2": Family("Gemma2ForCausalLM", {**_DECODER, "head_dim": 8, "query_pre_attn_scalar": 8,
                      "sliding_window": 4}, text, next_tokens),
    "Phi": Family("PhiForCausalLM", {**_DECODER, "resid_pdrop": 0.2}, text, next_tokens),
    "StableLM": Family("StableLmForCausalLM", _DECODER, text, next_tokens),
    "Falcon": Family("FalconForCausalLM", {**_SIZES, "hidden_dropout": 0.2, "attention_dropout": 0.2}, text,
                     next_tokens),
    "MPT": Family("MptForCausalLM", {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2,
                  "max_seq_len": 32}, text, next_tokens),
    "OLMo": Family("OlmoForCausalLM", _DECODER, text, next_tokens),
    "OLMoE": Family("OlmoeForCausalLM", {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2}, text, next_tokens),
    "DeepSeek-V3": Family("DeepseekV3ForCausalLM", {**_DECODER, "num_key_value_heads": 2, "q_lora_rank": 8,
                          "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                          "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
                          "first_k_dense_replace": 1, "moe_intermediate_size": 12}, text, next_tokens),
    "GPT-OSS": Family("GptOssForCausalLM", {**_DECODER, "head_dim": 8, "num_local_experts": 4,
                      "num_experts_per_tok": 2}, text, next_tokens),
    "Granite-MoE": Family("GraniteMoeForCausalLM", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, text,
                          next_tokens),
    "RecurrentGemma": Family("RecurrentGemmaForCausalLM", {**_DECODER, "lru_width": 16, "attention_window_size": 8,
                             "block_types": ["recurrent", "attention"]}, text, next_tokens),
    "RWKV": Family("RwkvForCausalLM", {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2,
                   "attention_hidden_size": 16, "intermediate_size": 24, "context_length": 32}, unmasked, next_tokens),
    "Mamba 2": Family("Mamba2ForCausalLM", {"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4, "num_heads": 4,
                      "head_dim": 8, "n_groups": 1, "num_hidden_layers": 2, "chunk_size": 4, "use_cache": False},
                      unmasked, next_tokens),
    "Falcon-Mamba": Family("FalconMambaForCausalLM", {"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4,
                           "num_hidden_layers": 2, "use_cache": False}, unmasked, next_tokens),
    "Jamba": Family("JambaForCausalLM", {**_DECODER, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4,
                    "mamba_dt_rank": 4, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1,
                    "expert_layer_period": 2, "expert_layer_offset": 1, "use_cache": False}, text, next_tokens),
    "Pegasus": Family("PegasusForConditionalGeneration", _SEQ2SEQ, text, answers),
    "Marian": Family("MarianMTModel", {**_SEQ2SEQ, "decoder_start_token_id": 2}, text, answers),
    "mBART": Family("MBartForConditionalGeneration", _SEQ2SEQ, text, answers),
    "M2M-100": Family("M2M100ForConditionalGeneration", {**_SEQ2SEQ, "encoder_layerdrop": 0, "decoder_layerdrop": 0,
                      "decoder_start_token_id": 2}, text, answers),
    "Blenderbot": Family("BlenderbotForConditionalGeneration", {**_SEQ2SEQ, "decoder_start_token_id": 2}, text,
                         answers),
    "ProphetNet": Family("ProphetNetForConditionalGeneration", {"vocab_size": VOCAB, "hidden_size": 16,
                         "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_encoder_layers": 1,
                         "num_decoder_layers": 1, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2,
                         "max_position_embeddings": 32}, text, answers),
    "DeiT": Family("DeiTForImageClassification", _VISION, pictures(), classes),
    "BEiT": Family("BeitForImageClassification", {**_VISION, "use_relative_position_bias": True}, pictures(), classes),
    "DINOv2": Family("Dinov2ForImageClassification", _VISION, pictures(), classes),
    "Swin": Family("SwinForImageClassification", {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1],
                   "num_heads": [2, 2], "window_size": 2, "num_labels": 3}, pictures(), classes),
    "SegFormer": Family("SegformerForImageClassification", {"num_encoder_blocks": 2, "depths": [1, 1],
                        "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2],
                        "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8,
                        "num_labels": 3}, pictures(32), classes),
    "MobileNetV2": Family("MobileNetV2ForImageClassification", {"depth_multiplier": 0.1, "num_labels": 3},
                          pictures(32), classes),
    "MobileViT": Family("MobileViTForImageClassification", {"image_size": 32, "hidden_sizes": [8, 8, 8],
                        "neck_hidden_sizes": [4, 4, 4, 8, 8, 8, 16], "num_attention_heads": 2, "num_labels": 3},
                        pictures(32), classes),
    "RegNet": Family("RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                     "groups_width": 4, "num_labels": 3}, pictures(32), classes),
    "EfficientNet": Family("EfficientNetForImageClassification", {"width_coefficient": 0.25, "depth_coefficient": 0.1,
                           "image_size": 32, "hidden_dim": 320, "num_labels": 3}, pictures(32), classes),
    "PoolFormer": Family("PoolFormerForImageClassification", {"depths": [1, 1], "hidden_sizes": [8, 16],
                         "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1],
                         "num_labels": 3}, pictures(32), classes),
    "LeViT": Family("LevitForImageClassification", {"image_size": 64, "hidden_sizes": [16, 16, 16],
                    "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8],
                    "mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2], "num_labels": 3}, pictures(64), classes),
    "ViT-MAE": Family("ViTMAEForPreTraining", {**_VISION, "decoder_hidden_size": 8, "decoder_num_hidden_layers": 1,
                      "decoder_num_attention_heads": 2, "decoder_intermediate_size": 12}, pictures()),
    "CLIP": Family("CLIPModel", {"text_config": {**_DECODER, "num_key_value_heads": None, "eos_token_id": 39,
                   "bos_token_id": 38}, "vision_config": {**_VISION}, "projection_dim": 8},
                   lambda g: {**text(g), **pictures()(g)}, keywords={"return_loss": True}),
    "HuBERT": Family("HubertForSequenceClassification", _SPEECH, sound, classes, freeze_features),
    "WavLM": Family("WavLMForSequenceClassification", {**_SPEECH, "num_buckets": 8}, sound, classes),
    "SEW": Family("SEWForSequenceClassification", {**_SPEECH, "squeeze_factor": 2}, sound, classes),
    "Speech2Text": Family("Speech2TextForConditionalGeneration", {**_SEQ2SEQ, "input_feat_per_channel": 8,
                          "input_channels": 1, "conv_channels": 8, "num_conv_layers": 1, "conv_kernel_sizes": [3],
                          "max_source_positions": 40, "max_target_positions": 16, "decoder_start_token_id": 2},
                          lambda g: {"input_features": torch.randn(ROWS, 20, 8, generator=g)}, answers),
    "AST": Family("ASTForAudioClassification", {**_VISION, "max_length": 24, "num_mel_bins": 16},
                  lambda g: {"input_values": torch.randn(ROWS, 24, 16, generator=g)}, classes),
    "TimeSeries": Family("TimeSeriesTransformerModel", {"prediction_length": 4, "context_length": 8, "d_model": 16,
                         "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                         "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
                         "lags_sequence": [1, 2], "encoder_layerdrop": 0, "decoder_layerdrop": 0,
                         "num_time_features": 1},
                         lambda g: {"past_values": torch.rand(ROWS, 10, generator=g),
                                    "past_time_features": torch.rand(ROWS, 10, 1, generator=g),
                                    "past_observed_mask": torch.ones(ROWS, 10),
                                    "future_values": torch.rand(ROWS, 4, generator=g),
                                    "future_time_features": torch.rand(ROWS, 4, 1, generator=g)}),
    "PatchTST": Family("PatchTSTForPretraining", {"num_input_channels": 2, "context_length": 16, "patch_length": 4,
                       "patch_stride": 4, "d_model": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "ffn_dim": 16, "random_mask_ratio": 0.4},
                       lambda g: {"past_values": torch.rand(ROWS, 16, 2, generator=g)}),
    "Decision Transformer": Family("DecisionTransformerModel", {"state_dim": 4, "act_dim": 3, "hidden_size": 16,
                                   "max_ep_len": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
                                   lambda g: {"states": torch.randn(ROWS, 5, 4, generator=g),
                                              "actions": torch.randn(ROWS, 5, 3, generator=g),
                                              "rewards": torch.randn(ROWS, 5, 1, generator=g),
                                              "returns_to_go": torch.randn(ROWS, 5, 1, generator=g),
                                              "timesteps": torch.arange(5).expand(ROWS, 5).contiguous(),
                                              "attention_mask": torch.ones(ROWS, 5)}),
}  # fmt: skip
