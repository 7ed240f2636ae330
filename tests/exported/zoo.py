"""Compares architectures that Python exports with Python: `make zoo` runs all of them, `make interop` a few.

    tools/python.sh tests/exported/zoo.py build/release/tests/exported/exported_program [--only gpt2 llama] [--quick]

For each: the loss and every gradient against eager Python, alone and under FSDP on 2 ranks; three steps of AdamW;
eval(); and, if sizes are dynamic, outputs for other sizes. Some have drop paths, whose eval() must be refused; some
have forces in their loss, under every wrapper. Models that torch.export changes silently must be refused. Prints a
table; docs/zoo.md has the last one. Exits with 1 if a model fails unexpectedly.
"""

import argparse
import copy
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are small: threads of two ranks and of Python would only wait

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import export_model  # noqa: E402
import programs  # noqa: E402

STEPS = 3
# of `make interop`, which has no torchvision
QUICK = ("gpt2", "llama", "t5", "gru_bn", "lstm", "flow", "lengths", "physics")
FORCES = {"physics", "molecule"}
DROPPING = {"swin_t_dropping", "timm_vit_dropping", "convnextv2_dropping"}  # with their drop paths
EVALUATED_OTHERWISE = DROPPING | {"norms"}  # their eval() is refused
KNOWN_TO_FAIL = set()  # reasons are in docs/zoo.md
MODELS = {}


def model(name):
    return lambda build: MODELS.setdefault(name, build)


def dim(name, most=8):
    return torch.export.Dim(name, min=2, max=most)


# ---- transformers: tiny configurations --------------------------------------------------------

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
             max_position_embeddings=32)
GROUPED = dict(SMALL, num_key_value_heads=2)
LATENT = dict(SMALL, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16,
              qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
BART = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=61, max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2)


def text_model(model_type, task="causal-lm", **settings):
    def build():
        import transformers

        class_name, inputs = export_model.TASKS[task]
        config = transformers.AutoConfig.for_model(model_type, **settings)
        net = export_model.from_config(getattr(transformers, class_name), config)
        export_model.without_cache(net)
        dims, given, shapes = {}, {}, {}
        for name in inputs:
            own = "labels" if name == "label" else name
            given[own], names = export_model.example(name, net.config, 2, 16)
            shapes[own] = {i: dims.setdefault(d, dim(d, 32)) for i, d in enumerate(names) if d == "batch"}
        return net, given, shapes
    return build


for name, (task, settings) in {
    "gpt2": ("causal-lm", dict(n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=32, bos_token_id=0, eos_token_id=0)),
    "llama": ("causal-lm", GROUPED),
    "qwen2": ("causal-lm", GROUPED),
    "qwen3": ("causal-lm", dict(GROUPED, head_dim=8)),
    "mistral": ("causal-lm", GROUPED),
    "gemma": ("causal-lm", dict(GROUPED, head_dim=8)),
    "gemma2": ("causal-lm", dict(GROUPED, head_dim=8)),
    "phi": ("causal-lm", SMALL),
    "phi3": ("causal-lm", dict(GROUPED, pad_token_id=0)),
    "gpt_neox": ("causal-lm", SMALL),
    "opt": ("causal-lm", dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
                              max_position_embeddings=32, word_embed_proj_dim=32)),
    "bloom": ("causal-lm", dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=61)),
    "falcon": ("causal-lm", dict(SMALL)),
    "mixtral": ("causal-lm", dict(GROUPED, num_local_experts=4)),
    "mamba": ("causal-lm", dict(hidden_size=32, num_hidden_layers=2, vocab_size=61, state_size=4)),
    "olmo2": ("causal-lm", GROUPED),
    **{name: ("causal-lm", dict(GROUPED, pad_token_id=0)) for name in (
        "stablelm", "cohere", "starcoder2", "olmo", "granite", "smollm3", "glm", "nemotron", "seed_oss", "exaone4",
        "ernie4_5", "arcee")},
    "gptj": ("causal-lm", dict(n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=32, rotary_dim=8)),
    "codegen": ("causal-lm", dict(n_layer=2, n_head=4, n_embd=32, vocab_size=61, n_positions=32, n_ctx=32, rotary_dim=4)),
    "gpt_neo": ("causal-lm", dict(hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4,
                                  vocab_size=61, max_position_embeddings=32, window_size=8)),
    "gpt_bigcode": ("causal-lm", dict(n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=32)),
    "openai-gpt": ("causal-lm", dict(n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=32)),
    "mpt": ("causal-lm", dict(d_model=32, n_heads=4, n_layers=2, vocab_size=61, max_seq_len=32, expansion_ratio=2)),
    "xglm": ("causal-lm", dict(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, vocab_size=61,
                               max_position_embeddings=32)),
    "biogpt": ("causal-lm", SMALL),
    "xlnet": ("causal-lm", dict(d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=61, use_mems_train=False,
                                use_mems_eval=False)),
    "gemma3_text": ("causal-lm", dict(GROUPED, head_dim=8, sliding_window=8)),
    "qwen2_moe": ("causal-lm", dict(GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                    shared_expert_intermediate_size=16, decoder_sparse_step=1)),
    "qwen3_moe": ("causal-lm", dict(GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
    "olmoe": ("causal-lm", dict(GROUPED, num_experts=4, num_experts_per_tok=2, pad_token_id=0)),
    "deepseek_v2": ("causal-lm", dict(LATENT, q_lora_rank=None, n_group=None, topk_group=None, topk_method="greedy")),
    "deepseek_v3": ("causal-lm", dict(LATENT, q_lora_rank=16, n_group=2, topk_group=1)),
    "mamba2": ("causal-lm", dict(hidden_size=32, num_hidden_layers=2, vocab_size=61, state_size=4, num_heads=4, head_dim=16,
                                 n_groups=1, chunk_size=8)),
    "falcon_mamba": ("causal-lm", dict(hidden_size=32, num_hidden_layers=2, vocab_size=61, state_size=4)),
    "rwkv": ("causal-lm", dict(hidden_size=32, num_hidden_layers=2, vocab_size=61, attention_hidden_size=32,
                               context_length=32)),
    "recurrent_gemma": ("causal-lm", dict(SMALL, num_key_value_heads=1, lru_width=32, attention_window_size=8,
                                          num_hidden_layers=3)),
    "jamba": ("causal-lm", dict(GROUPED, num_experts=2, num_experts_per_tok=1, mamba_d_state=4, mamba_dt_rank=4,
                                attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                                pad_token_id=0)),
    "cohere2": ("causal-lm", dict(GROUPED, pad_token_id=0, sliding_window=8)),
    "glm4": ("causal-lm", dict(GROUPED, head_dim=8, pad_token_id=0)),
    "granitemoe": ("causal-lm", dict(GROUPED, num_local_experts=4, num_experts_per_tok=2)),
    "gpt_oss": ("causal-lm", dict(GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)),
    "llama4_text": ("causal-lm", dict(GROUPED, head_dim=8, num_local_experts=4, intermediate_size_mlp=48, pad_token_id=0)),
    "qwen3_next": ("causal-lm", dict(GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                     shared_expert_intermediate_size=16, linear_key_head_dim=8, linear_value_head_dim=8,
                                     linear_num_key_heads=2, linear_num_value_heads=2)),
    "hunyuan_v1_dense": ("causal-lm", dict(GROUPED, head_dim=8, pad_token_id=0)),
    "diffllama": ("causal-lm", GROUPED),
    "helium": ("causal-lm", dict(GROUPED, head_dim=8)),
    "lfm2": ("causal-lm", dict(GROUPED, layer_types=["conv", "full_attention"], block_ff_dim=48)),
    "persimmon": ("causal-lm", SMALL),
    "ctrl": ("causal-lm", dict(n_embd=32, dff=48, n_layer=2, n_head=4, vocab_size=61, n_positions=32)),
    "zamba2": ("causal-lm", dict(GROUPED, mamba_d_state=4, mamba_headdim=16, mamba_ngroups=1, n_mamba_heads=4, chunk_size=8,
                                 layers_block_type=["mamba", "hybrid"], use_mamba_kernels=False, num_mem_blocks=1,
                                 use_long_context=False, adapter_rank=4)),
    "bamba": ("causal-lm", dict(GROUPED, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=8,
                                attn_layer_indices=[1], pad_token_id=0)),
    "olmo3": ("causal-lm", dict(GROUPED, sliding_window=8, pad_token_id=0)),
    "bitnet": ("causal-lm", dict(GROUPED, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "doge": ("causal-lm", dict(GROUPED, pad_token_id=0)),
    "nanochat": ("causal-lm", dict(GROUPED, pad_token_id=0, bos_token_id=1)),
    "modernbert-decoder": ("causal-lm", dict(SMALL, pad_token_id=0, local_attention=8, bos_token_id=1, eos_token_id=2, cls_token_id=1,
                                             sep_token_id=2)),
    "glm4_moe": ("causal-lm", dict(GROUPED, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                   first_k_dense_replace=1, pad_token_id=0)),
    "jetmoe": ("causal-lm", dict(GROUPED, kv_channels=8, num_local_experts=4, num_experts_per_tok=2)),
    "minimax": ("causal-lm", dict(GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, block_size=8, pad_token_id=0)),
    "falcon_h1": ("causal-lm", dict(GROUPED, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4,
                                    mamba_n_groups=1, mamba_chunk_size=8, pad_token_id=0)),
    "granitemoehybrid": ("causal-lm", dict(GROUPED, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=16,
                                           layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4,
                                           mamba_n_groups=1, mamba_chunk_size=8, pad_token_id=0)),
    "nemotron_h": ("causal-lm", dict(GROUPED, head_dim=8, hybrid_override_pattern="M*", mamba_num_heads=4, mamba_head_dim=16,
                                     ssm_state_size=4, n_groups=1, chunk_size=8, pad_token_id=0)),
    "xlstm": ("causal-lm", dict(hidden_size=32, embedding_dim=32, num_hidden_layers=2, num_blocks=2, num_heads=2, vocab_size=61,
                                chunk_size=8, pad_token_id=0)),
    "mobilebert": ("masked-lm", dict(SMALL, embedding_size=16, intra_bottleneck_size=32, true_hidden_size=32)),
    "xlm": ("masked-lm", dict(emb_dim=32, n_layers=2, n_heads=4, vocab_size=61, max_position_embeddings=32, dropout=0.0,
                              attention_dropout=0.0)),
    "t5gemma": ("seq2seq-lm", dict(encoder=dict(GROUPED, head_dim=8, sliding_window=8), decoder=dict(GROUPED, head_dim=8, sliding_window=8),
                                   vocab_size=61)),
    "pegasus_x": ("seq2seq-lm", dict(BART, block_size=8, num_global_tokens=4)),
    "funnel": ("masked-lm", dict(d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1], vocab_size=61)),
    "fnet": ("masked-lm", dict(SMALL, use_tpu_fourier_optimizations=False)),
    "rembert": ("masked-lm", dict(SMALL, input_embedding_size=16, output_embedding_size=16)),
    "xmod": ("masked-lm", dict(SMALL, max_position_embeddings=40, languages=["en_XX"], default_language="en_XX")),
    "prophetnet": ("seq2seq-lm", dict(hidden_size=32, encoder_ffn_dim=48, decoder_ffn_dim=48, num_encoder_layers=2,
                                      num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
                                      vocab_size=61, max_position_embeddings=32, dropout=0.0)),
    "bert": ("masked-lm", SMALL),
    "roberta": ("masked-lm", dict(SMALL, max_position_embeddings=40)),
    "distilbert": ("masked-lm", dict(dim=32, hidden_dim=48, n_layers=2, n_heads=4, vocab_size=61, max_position_embeddings=32)),
    "electra": ("masked-lm", dict(SMALL, embedding_size=32)),
    "albert": ("masked-lm", dict(SMALL, embedding_size=16)),
    **{name: ("masked-lm", dict(SMALL, pad_token_id=0)) for name in (
        "deberta", "deberta-v2", "ernie", "roformer", "convbert", "megatron-bert", "layoutlm", "modernbert")},
    **{name: ("masked-lm", dict(SMALL, max_position_embeddings=40)) for name in ("mpnet", "camembert", "xlm-roberta", "luke")},
    "squeezebert": ("masked-lm", dict(SMALL, embedding_size=32, q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1,
                                      intermediate_groups=1, output_groups=1)),
    "big_bird": ("masked-lm", dict(SMALL, attention_type="original_full")),
    "esm": ("masked-lm", dict(SMALL, pad_token_id=1, mask_token_id=4, max_position_embeddings=40, token_dropout=False)),
    **{name: ("seq2seq-lm", dict(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=61, decoder_start_token_id=0))
       for name in ("t5", "mt5", "umt5")},
    "longt5": ("seq2seq-lm", dict(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=61, local_radius=4,
                                  decoder_start_token_id=0)),
    **{name: ("seq2seq-lm", BART) for name in (
        "bart", "mbart", "pegasus", "blenderbot", "blenderbot-small", "marian", "plbart", "m2m_100")},
}.items():
    MODELS[name] = text_model(name, task, **settings)


def vision(model_type, class_name="AutoModelForImageClassification", **settings):
    def build():
        import transformers

        config = transformers.AutoConfig.for_model(model_type, **settings)
        automatic = getattr(transformers, class_name)
        net = automatic.from_config(config) if class_name.startswith("Auto") else automatic(config)
        size = settings.get("image_size", 32)
        size = size[0] if isinstance(size, tuple) else size
        given = {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}
        batch = dim("batch")
        return net, given, {name: {0: batch} for name in given}
    return build


PATCHES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
MODELS["vit"] = vision("vit", **PATCHES)
# the automatic choice has a teacher, and no loss
MODELS["deit"] = vision("deit", "DeiTForImageClassification", **PATCHES)
MODELS["beit"] = vision("beit", **PATCHES)
MODELS["vit_msn"] = vision("vit_msn", **PATCHES)
PYRAMID = dict(num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2])
MODELS["segformer"] = vision("segformer", **PYRAMID, sr_ratios=[2, 1], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                             decoder_hidden_size=16)
MODELS["pvt_v2"] = vision("pvt_v2", **PYRAMID, image_size=32, sr_ratios=[2, 1], num_attention_heads=[1, 2], mlp_ratios=[2, 2])
MODELS["poolformer"] = vision("poolformer", **PYRAMID, padding=[1, 1], mlp_ratio=2.0)
MODELS["convnextv2"] = vision("convnextv2", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
MODELS["resnet_hf"] = vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
MODELS["regnet_hf"] = vision("regnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8)
MODELS["mobilevit"] = vision("mobilevit", image_size=32, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 48],
                             num_attention_heads=2)
MODELS["focalnet"] = vision("focalnet", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], focal_levels=[1, 1],
                            focal_windows=[3, 3])
MODELS["swinv2"] = vision("swinv2", image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
MODELS["levit"] = vision("levit", "LevitForImageClassification", image_size=64, hidden_sizes=[16, 24, 32],
                         num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8])
MODELS["hiera"] = vision("hiera", image_size=(32, 32), patch_size=(3, 3), patch_stride=(4, 4), patch_padding=(1, 1),
                         embed_dim=8, depths=(1, 1), num_heads=(1, 2), num_query_pool=1, query_stride=(2, 2),
                         masked_unit_size=(4, 4), mlp_ratio=2.0)
MODELS["bit"] = vision("bit", embedding_size=8, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4, layer_type="bottleneck")
MODELS["dinov2"] = vision("dinov2", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
MODELS["swin_hf"] = vision("swin", image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)


@model("clip")
def clip():
    from transformers import CLIPConfig, CLIPModel

    text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
                max_position_embeddings=16, projection_dim=16, eos_token_id=60)
    net = CLIPModel(CLIPConfig(text_config=text, vision_config=dict(PATCHES, projection_dim=16), projection_dim=16))
    ids = torch.randint(3, 59, (2, 12))
    return net, {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32), "attention_mask": torch.ones(2, 12).long()}, None


@model("whisper")
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    net = WhisperForConditionalGeneration(WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=61, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, use_cache=False))
    return net, {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.randint(3, 60, (2, 8)),
                 "labels": torch.randint(3, 60, (2, 8))}, None


def speech(name, **settings):
    def build():
        import transformers

        config = getattr(transformers, f"{name}Config")(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16),
            conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
            mask_time_prob=0.0, layerdrop=0.0, apply_spec_augment=False, **settings)
        return getattr(transformers, f"{name}Model")(config), {"input_values": torch.randn(2, 400)}, None
    return build


for name in ("Wav2Vec2", "WavLM", "Hubert", "UniSpeech", "SEW"):
    MODELS[name.lower()] = speech(name, **({"squeeze_factor": 1} if name == "SEW" else {}))


@model("siglip")
def siglip():
    from transformers import SiglipConfig, SiglipModel

    text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
                max_position_embeddings=16)
    net = SiglipModel(SiglipConfig(text_config=text, vision_config=PATCHES))
    return net, {"input_ids": torch.randint(3, 59, (2, 16)), "pixel_values": torch.randn(2, 3, 32, 32)}, None


@model("blip")
def blip():
    from transformers import BlipConfig, BlipForConditionalGeneration

    text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
                max_position_embeddings=16, encoder_hidden_size=32, bos_token_id=1, pad_token_id=0, eos_token_id=2,
                sep_token_id=2)
    net = BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=PATCHES))
    ids = torch.randint(3, 59, (2, 10))
    return net, {"pixel_values": torch.randn(2, 3, 32, 32), "input_ids": ids, "labels": ids.clone()}, None


@model("vit_mae")
def vit_mae():
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    net = ViTMAEForPreTraining(ViTMAEConfig(**PATCHES, decoder_hidden_size=16, decoder_num_hidden_layers=1,
                                            decoder_num_attention_heads=2, decoder_intermediate_size=24))
    return net, {"pixel_values": torch.randn(2, 3, 32, 32), "noise": torch.rand(2, 16)}, None


@model("patchtst")
def patchtst():
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    net = PatchTSTForPrediction(PatchTSTConfig(
        num_input_channels=3, context_length=32, prediction_length=8, patch_length=8, patch_stride=8, d_model=16, ffn_dim=24,
        num_hidden_layers=2, num_attention_heads=2, random_mask_ratio=0.0, do_mask_input=False, loss="mse"))
    return net, {"past_values": torch.randn(2, 32, 3), "future_values": torch.randn(2, 8, 3)}, None


@model("decision_transformer")
def decision_transformer():
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    net = DecisionTransformerModel(DecisionTransformerConfig(
        state_dim=5, act_dim=3, hidden_size=32, n_layer=2, n_head=4, n_positions=64, max_ep_len=16))
    return net, {"states": torch.randn(2, 6, 5), "actions": torch.randn(2, 6, 3), "rewards": torch.randn(2, 6, 1),
                 "returns_to_go": torch.randn(2, 6, 1), "timesteps": torch.arange(6).expand(2, 6).contiguous(),
                 "attention_mask": torch.ones(2, 6).long()}, None


@model("perceiver")
def perceiver():
    from transformers import PerceiverConfig, PerceiverForMaskedLM

    net = PerceiverForMaskedLM(PerceiverConfig(
        num_latents=4, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2,
        num_cross_attention_heads=2, vocab_size=61, max_position_embeddings=12, qk_channels=16, v_channels=16))
    ids = torch.randint(3, 60, (2, 12))
    return net, {"inputs": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}, None


TEXT = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
            max_position_embeddings=64)


def with_images(net, images, batch=2, **more):
    """A model that replaces `images` places of its text by an image."""
    export_model.without_cache(net)
    ids = torch.cat([torch.full((batch, images), 60), torch.randint(3, 59, (batch, 8))], 1)
    return net, {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 32, 32), "attention_mask": torch.ones_like(ids),
                 "labels": ids.clone(), **more}, None


@model("llava")
def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    return with_images(LlavaForConditionalGeneration(LlavaConfig(
        vision_config=CLIPVisionConfig(**PATCHES, projection_dim=16), text_config=LlamaConfig(**TEXT, num_key_value_heads=2),
        image_token_index=60, image_token_id=60, vision_feature_layer=-1)), 16)


@model("blip2")
def blip2():
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    text = dict(model_type="opt", hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
                max_position_embeddings=64, word_embed_proj_dim=32)
    return with_images(Blip2ForConditionalGeneration(Blip2Config(
        vision_config=PATCHES, qformer_config=dict(TEXT, encoder_hidden_size=32, cross_attention_frequency=1), text_config=text,
        num_query_tokens=4, image_token_index=60, image_text_hidden_size=16)), 4)


@model("sam")
def sam():
    from transformers import SamConfig, SamModel

    net = SamModel(SamConfig(
        vision_config=dict(hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8,
                           mlp_dim=48, window_size=4, global_attn_indexes=[1], num_pos_feats=8),
        prompt_encoder_config=dict(hidden_size=16, image_size=64, patch_size=8, mask_input_channels=4),
        mask_decoder_config=dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_dim=32, iou_head_hidden_dim=16)))
    return net, {"pixel_values": torch.randn(2, 3, 64, 64), "input_points": torch.rand(2, 1, 2, 2) * 60,
                 "input_labels": torch.ones(2, 1, 2).long()}, None


@model("yolos")
def yolos():
    from transformers import YolosConfig, YolosForObjectDetection

    net = YolosForObjectDetection(YolosConfig(**{**PATCHES, "image_size": [32, 32]}, num_detection_tokens=5, num_labels=4))
    return net, {"pixel_values": torch.randn(2, 3, 32, 32)}, None


@model("videomae")
def videomae():
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    net = VideoMAEForVideoClassification(VideoMAEConfig(**PATCHES, num_frames=4, tubelet_size=2))
    return net, {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.tensor([0, 1])}, None


@model("speech_to_text")
def speech_to_text():
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    settings = {key: value for key, value in BART.items() if key not in ("max_position_embeddings", "forced_eos_token_id")}
    net = Speech2TextForConditionalGeneration(Speech2TextConfig(
        **settings, max_source_positions=32, max_target_positions=32, input_feat_per_channel=8, conv_channels=16, use_cache=False,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0))
    return net, {"input_features": torch.randn(2, 32, 8), "attention_mask": torch.ones(2, 32).long(),
                 "decoder_input_ids": torch.randint(3, 60, (2, 8)), "labels": torch.randint(3, 60, (2, 8))}, None


@model("timesfm")
def timesfm():
    from transformers import TimesFmConfig, TimesFmModel

    net = TimesFmModel(TimesFmConfig(patch_length=8, context_length=32, horizon_length=8, num_hidden_layers=2, hidden_size=32,
                                     intermediate_size=48, head_dim=8, num_attention_heads=4))
    return net, {"past_values": torch.randn(2, 32), "past_values_padding": torch.zeros(2, 32).long(),
                 "freq": torch.zeros(2, 1).long()}, None


@model("encoder_decoder")
def encoder_decoder():
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(**SMALL), BertConfig(**SMALL, is_decoder=True, add_cross_attention=True))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    net = EncoderDecoderModel(config)
    export_model.without_cache(net)
    return net, {"input_ids": torch.randint(3, 60, (2, 12)), "decoder_input_ids": torch.randint(3, 60, (2, 6)),
                 "labels": torch.randint(3, 60, (2, 6))}, None


# ---- torchvision, timm, diffusers -------------------------------------------------------------


def tv(function, size=64, **settings):
    def build():
        import torchvision

        net = getattr(torchvision.models, function)(num_classes=5, **settings)
        return net, {"x": torch.randn(2, 3, size, size)}, {"x": {0: dim("batch")}}
    return build


for name in ("resnet18", "convnext_tiny", "efficientnet_b0", "swin_t", "mobilenet_v3_small", "densenet121", "vgg11_bn",
             "regnet_y_400mf", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "alexnet", "mobilenet_v2",
             "resnext50_32x4d", "wide_resnet50_2", "efficientnet_v2_s", "swin_v2_t"):
    MODELS[name] = tv(name)
MODELS["googlenet"] = tv("googlenet", aux_logits=False, init_weights=False)
MODELS["vit_b_16"] = tv("vit_b_16", image_size=64)


@model("maxvit")
def maxvit():
    from torchvision.models import MaxVit

    net = MaxVit(input_size=(64, 64), stem_channels=8, partition_size=2, block_channels=[8, 16], block_layers=[1, 1], head_dim=8,
                 stochastic_depth_prob=0.0, num_classes=5)
    return net, {"x": torch.randn(2, 3, 64, 64)}, None


def video(function):
    def build():
        from torchvision.models import video as models

        return getattr(models, function)(weights=None, num_classes=4), {"x": torch.randn(2, 3, 8, 32, 32)}, {"x": {0: dim("batch")}}
    return build


for name in ("r3d_18", "r2plus1d_18"):
    MODELS[name] = video(name)


def segmentation(function, size):
    def build():
        import torchvision

        net = getattr(torchvision.models.segmentation, function)(weights=None, weights_backbone=None, num_classes=3)
        return net, {"x": torch.randn(2, 3, size, size)}, {"x": {0: dim("batch")}}
    return build


MODELS["fcn_resnet50"] = segmentation("fcn_resnet50", 32)
MODELS["deeplabv3_mobilenet"] = segmentation("deeplabv3_mobilenet_v3_large", 64)


@model("raft")
def optical_flow():
    from torchvision.models.optical_flow import raft_small

    net = raft_small(weights=None)
    return net, {"image1": torch.rand(1, 3, 128, 128) * 2 - 1, "image2": torch.rand(1, 3, 128, 128) * 2 - 1, "num_flow_updates": 2}, None


@model("retinanet_head")
def detection_head():
    from torchvision.models.detection.retinanet import RetinaNetHead

    return RetinaNetHead(8, 3, 4), {"x": [torch.randn(1, 8, 8, 8), torch.randn(1, 8, 4, 4)]}, None


@model("swin3d")
def swin3d():
    from torchvision.models.video import SwinTransformer3d

    net = SwinTransformer3d(patch_size=[2, 4, 4], embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=[2, 4, 4],
                            stochastic_depth_prob=0.0, num_classes=4)
    return net, {"x": torch.randn(2, 3, 4, 32, 32)}, None


@model("timm_mixer")
def mixer():
    import timm

    net = timm.create_model("mixer_s32_224", num_classes=5, img_size=64)
    return net, {"x": torch.randn(2, 3, 64, 64)}, {"x": {0: dim("batch")}}


@model("resnet_fpn")
def pyramid():
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    net = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=3)
    return net, {"x": torch.randn(2, 3, 64, 64)}, {"x": {0: dim("batch")}}


def timm_model(name, size=64, **settings):
    def build():
        import timm

        net = timm.create_model(name, num_classes=5, **settings)
        return net, {"x": torch.randn(2, 3, size, size)}, {"x": {0: dim("batch")}}
    return build


MODELS["timm_xcit"] = timm_model("xcit_nano_12_p16_224", img_size=64, depth=2)
MODELS["timm_eva02"] = timm_model("eva02_tiny_patch14_224", size=56, img_size=56, depth=2)
MODELS["timm_nfnet"] = timm_model("nfnet_l0")
MODELS["timm_coatnet"] = timm_model("coatnet_nano_rw_224", img_size=64)
MODELS["timm_edgenext"] = timm_model("edgenext_xx_small")
MODELS["timm_ghostnet"] = timm_model("ghostnet_050")
MODELS["timm_hrnet"] = timm_model("hrnet_w18_small")
MODELS["timm_repvgg"] = timm_model("repvgg_a0")


MODELS["timm_vit_dropping"] = timm_model("vit_tiny_patch16_224", size=32, img_size=32, depth=2, drop_path_rate=0.3)
MODELS["swin_t_dropping"] = tv("swin_t")
MODELS["convnextv2_dropping"] = vision("convnextv2", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.5)


@model("diffusers_unet")
def diffusion():
    from diffusers import UNet2DModel

    net = UNet2DModel(sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
                      norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                      up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8)
    return net, {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 40])}, None


@model("diffusers_vae")
def autoencoder():
    from diffusers import AutoencoderKL

    net = AutoencoderKL(in_channels=3, out_channels=3, block_out_channels=(8, 16), latent_channels=2, norm_num_groups=4,
                        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    return net, {"sample": torch.randn(2, 3, 16, 16)}, None


@model("diffusers_dit")
def diffusion_transformer():
    from diffusers import DiTTransformer2DModel

    net = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=8, patch_size=2,
                                norm_num_groups=1, num_embeds_ada_norm=10)
    return net, {"hidden_states": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 40]),
                 "class_labels": torch.tensor([1, 4])}, None


@model("diffusers_flux")
def flux():
    from diffusers import FluxTransformer2DModel

    net = FluxTransformer2DModel(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
                                 num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8])
    return net, {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
                 "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]), "img_ids": torch.rand(16, 3),
                 "txt_ids": torch.rand(8, 3)}, None


# ---- plain torch ------------------------------------------------------------------------------


@model("lstm")
def lstm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm = nn.Embedding(31, 12), nn.LSTM(12, 16, num_layers=2, batch_first=True, dropout=0.1)
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 31)

        def forward(self, x):
            return self.head(self.norm(self.lstm(self.embed(x))[0]))
    return Net(), {"x": torch.randint(0, 31, (2, 9))}, {"x": {0: dim("batch")}}


@model("gru_bn")
def gru():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.norm, self.head = nn.GRU(6, 10, batch_first=True, bidirectional=True), nn.BatchNorm1d(20), nn.Linear(20, 3)

        def forward(self, x):
            return self.head(self.norm(self.gru(x)[0].transpose(1, 2)).mean(-1))
    return Net(), {"x": torch.randn(3, 7, 6)}, {"x": {0: dim("batch")}}


@model("unet")
def unet():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
            self.down2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.last = nn.Conv2d(16, 2, 1)

        def forward(self, x):
            a = self.down1(x)
            return self.last(torch.cat([self.up(self.down2(a)), a], 1))
    return Net(), {"x": torch.randn(2, 1, 16, 16)}, {"x": {0: dim("batch")}}


@model("graph_network")
def graph_network():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.message = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 8))
            self.update = nn.GRUCell(8, 4)

        def forward(self, nodes, edges, lengths):
            for _ in range(2):
                sent = self.message(torch.cat([nodes[edges[0]], nodes[edges[1]], lengths], -1))
                got = torch.zeros(nodes.shape[0], 8).index_add_(0, edges[1], sent)
                nodes = self.update(got, nodes)
            return nodes.sum(0)
    return Net(), {"nodes": torch.randn(6, 4), "edges": torch.randint(0, 6, (2, 11)), "lengths": torch.rand(11, 1)}, None


@model("physics")
def physics():
    class Net(nn.Module):
        """A wave equation, whose residual needs second derivatives through the inputs."""

        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, points):
            return self.layers(points)
    return Net(), {"points": torch.rand(10, 2)}, {"points": {0: dim("batch", 64)}}


def program(make):
    def build():
        net = make()
        return net, net.inputs(), getattr(net, "shapes", None)
    return build


for name, make in programs.PROGRAMS.items():
    MODELS[name] = program(make)


# ---- comparison --------------------------------------------------------------------------------


def loss_of(outputs):
    if hasattr(outputs, "get") and outputs.get("loss") is not None:
        return outputs["loss"]
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(leaf.float().pow(2).mean() for leaf in leaves)


def without_dropout(net):
    """Disables dropout: each FSDP rank draws its own numbers, so results could not be compared."""
    for module in net.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d)) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name in ("drop_prob", "drop_rate", "layerdrop")):
                setattr(module, name, 0.0)


def compare(name, got, expected, rtol=2e-4, atol=2e-5):
    """The largest difference, relative to the largest value of the tensor."""
    if got.shape != expected.shape:
        raise AssertionError(f"{name} is {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = (got.double() - expected.double()).abs().max().item() if got.numel() else 0.0
    scale = expected.double().abs().max().item() if got.numel() else 0.0
    if not difference <= atol + rtol * scale:
        raise AssertionError(f"{name} differs by {difference:.3g}, of values up to {scale:.3g}")
    return difference / (scale + 1e-12) if scale > 1e-4 else 0.0


def python_results(net, inputs):
    """Returns the results of a step in training mode, the losses of STEPS steps, and eval()'s outputs with the initial
    values."""
    results = {}
    evaluated = copy.deepcopy(net).eval()
    with torch.no_grad():
        for i, leaf in enumerate(pytree.tree_leaves(evaluated(**clones(inputs)))):
            if isinstance(leaf, torch.Tensor):
                results[f"eval.{i}"] = leaf.clone()
    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for step in range(STEPS):
        torch.manual_seed(5)
        outputs = net(**clones(inputs))
        if step == 0:
            for i, leaf in enumerate(pytree.tree_leaves(outputs)):
                if isinstance(leaf, torch.Tensor):
                    results[f"output.{i}"] = leaf.detach().clone()
        loss = loss_of(outputs)
        results[f"loss.{step}"] = loss.detach().clone()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            for own, parameter in net.named_parameters():
                if parameter.grad is not None:
                    results[f"grad.{own}"] = parameter.grad.clone()
        optimizer.step()
    return results


def resized(inputs, shapes):
    """Inputs of other sizes, made of existing rows; None if no size is dynamic."""
    named = [(name, place, dimension) for name, dims in (shapes or {}).items()
             if isinstance(dims, dict) and isinstance(inputs[name], torch.Tensor)
             for place, dimension in dims.items() if isinstance(dimension, torch.export.Dim)]
    sizes, given = {}, dict(inputs)
    for name, place, dimension in sorted(named, key=lambda each: hasattr(each[2], "root")):  # such as 2 * batch, last
        own = given[name].shape[place]
        if hasattr(dimension, "root"):
            new = dimension.fn(sizes[dimension.root.__name__])
        else:
            new = sizes.setdefault(dimension.__name__, own + 1 if own < dimension.max else own - 1)
        given[name] = given[name].index_select(place, torch.arange(new) % own)
    return given if named else None


def check_forces(name, net, inputs, archive, program, folder):
    """Second order: the loss includes the gradient through an input, and SGD differentiates it."""
    from safetensors.torch import load_file

    net, (through, value) = copy.deepcopy(net).train(), next(iter(inputs.items()))
    optimizer, expected = torch.optim.SGD(net.parameters(), 1e-2), []
    for _ in range(STEPS):
        given = value.clone().requires_grad_()
        outputs = net(**{**clones(inputs), through: given})
        forces, = torch.autograd.grad(outputs.sum(), given, create_graph=True)
        loss = loss_of(outputs) + forces.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    for stage in range(4):
        run_program([program, archive, folder / f"{name}-inputs.safetensors", folder / "forces.safetensors", "ranks=2",
                     f"steps={STEPS}", f"stage={stage}", f"forces={through}"])
        got = load_file(folder / "forces.safetensors")
        for step, loss in enumerate(expected):
            compare(f"stage {stage}, loss {step} with forces", got[f"loss.{step}"], loss, rtol=1e-5)


def run_program(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command[4:]))}: {done.stderr.strip()[-600:] or done.returncode}")


def clones(inputs):
    return pytree.tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, inputs)


def write_inputs(inputs, file):
    """Writes inputs in the format of exported_program."""
    from safetensors.torch import save_file

    written = {}

    def write(name, value):
        if dataclasses.is_dataclass(value):
            value = vars(value)
        if isinstance(value, (dict, list, tuple)):
            for key, element in value.items() if isinstance(value, dict) else enumerate(value):
                write(f"{name}/{key}", element)
        elif isinstance(value, torch.Tensor):
            written[f"input.{name}"] = value.clone(memory_format=torch.contiguous_format)
        elif value is None:
            written[f"none.{name}"] = torch.zeros(1)
        elif isinstance(value, str):
            written[f"text.{name}"] = torch.tensor(list(value.encode()), dtype=torch.uint8)
        else:
            written[f"number.{name}"] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)

    for name, value in inputs.items():
        write(name, value)
    save_file(written, file)


def check(name, program, folder):
    """Returns (nodes, largest relative difference of a gradient) or an exception."""
    from safetensors.torch import load_file

    torch.manual_seed(1)
    net, inputs, shapes = MODELS[name]()
    if name not in DROPPING:
        without_dropout(net)
    archive, given = folder / f"{name}.pt2", folder / f"{name}-inputs.safetensors"
    exported = export_model.export(net, inputs, shapes)
    export_model.save(exported, archive)
    write_inputs(inputs, given)
    nodes = sum(node.op == "call_function" for node in exported.graph.nodes)
    if name in FORCES:
        check_forces(name, net, inputs, archive, program, folder)
    other = net.others() if hasattr(net, "others") else resized(inputs, shapes)
    if other is not None:
        other_given, other_results = folder / f"{name}-others.safetensors", folder / f"{name}-other-results.safetensors"
        write_inputs(other, other_given)
        run_program([program, archive, other_given, other_results])
        others, got = python_results(copy.deepcopy(net), other), load_file(other_results)
        for key in others:
            if key.startswith("output.") or key == "loss.0":
                compare(f"{key} of other sizes", got[key], others[key].to(got[key].dtype))
    expected = python_results(net, inputs)
    worst = 0.0
    # libtorch's AdamW squares complex gradients; Python's squares their parts.
    steps = 1 if any(parameter.is_complex() for parameter in net.parameters()) else STEPS
    expected = {key: tensor for key, tensor in expected.items() if key[:5] != "loss." or int(key[5:]) < steps}
    # Each rank draws its own random numbers.
    modes = [[f"steps={steps}"], ["eval"], *([] if name in DROPPING else [["ranks=2", f"steps={steps}"]])]
    for settings in modes:
        results = folder / f"{name}-results.safetensors"
        command = [program, archive, given, results, *settings]
        if name in EVALUATED_OTHERWISE and settings == ["eval"]:
            try:
                run_program(command)
            except RuntimeError as error:
                if "from which it cannot be switched" not in str(error):
                    raise
                continue
            raise AssertionError("eval() is not refused")
        run_program(command)
        got = load_file(results)
        # AdamW divides by the gradients' size, so gradients that are rounding errors move parameters in either
        # direction.
        for key, tensor in expected.items():
            if settings == ["eval"]:
                if not key.startswith("eval."):
                    continue
                compare(key, got[key.replace("eval.", "output.")], tensor)
            elif key.startswith("grad."):
                if key not in got:
                    raise AssertionError(f"{key} is missing")
                worst = max(worst, compare(key, got[key], tensor))
            elif key.startswith("loss."):
                compare(key, got[key], tensor.float(), rtol=1e-5 if key == "loss.0" else 1e-3)
            elif key.startswith("output."):
                compare(key, got[key], tensor)
        extra = {key for key in got if key.startswith("grad.")} - set(expected)
        aliases = {n for n, p in net.named_parameters(remove_duplicate=False)} - {n for n, _ in net.named_parameters()}
        if settings != ["eval"] and {key[5:] for key in extra} - aliases:
            raise AssertionError(f"gradients that Python does not have: {sorted(extra)[:3]}")
    return nodes, worst


def check_refused(name):
    make, *named = programs.REFUSED[name]
    net, inputs, shapes = program(make)()
    try:
        export_model.export(net, inputs, shapes)
    except ValueError as error:
        if not all(text in str(error) for text in named):
            raise
        return
    raise AssertionError(f"{name} is exported with other gradients")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", help="a file to write the table to")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    program = str(pathlib.Path(arguments.program).resolve())
    names = arguments.only or (QUICK if arguments.quick else list(MODELS))
    lines, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            began = time.time()
            try:
                nodes, worst = check(name, program, pathlib.Path(folder))
                lines.append(f"| {name} | {nodes} | {worst:.0e} | |")
                print(f"ok    {name}: {nodes} nodes, gradients to {worst:.1e}, {time.time() - began:.0f} s", flush=True)
            except Exception as error:  # noqa: BLE001: the table says which
                reason = f"{type(error).__name__}: {str(error).strip()}".replace("\n", " ")[:300]
                failed.append(name)
                lines.append(f"| {name} | | | {reason} |")
                print(f"FAILS {name}: {reason}", flush=True)
                if os.environ.get("ZOO_TRACEBACK"):
                    traceback.print_exc()
            for file in pathlib.Path(folder).iterdir():
                file.unlink()
    for name in [] if arguments.only else programs.REFUSED:
        check_refused(name)
        print(f"ok    {name} is refused", flush=True)
    print(f"{len(names) - len(failed)} of {len(names)} compute what Python computes")
    if arguments.table:
        pathlib.Path(arguments.table).write_text("\n".join(lines) + "\n")
    return 1 if set(failed) - KNOWN_TO_FAIL else 0


if __name__ == "__main__":
    sys.exit(main())
