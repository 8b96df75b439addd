"""Tiny models of real classes, for the tests that compare with transformers.

Sizes are awkward on purpose: mostly odd, with few layers and experts, so that shards are uneven and
some empty. Every floating-point parameter and persistent buffer is drawn at random, since the
class's own values (zeros, ones) would hide a misplaced element.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from program import write_shards
from safetensors.torch import load_file

Tensors = dict[str, Any]
Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A class, a tiny configuration of it, and the form on the hub if it differs from
    `save_pretrained`'s."""

    name: str
    cls: str
    model_type: str
    config: Config
    dtype: str = "float32"
    hub: Callable[[Tensors, Any], Tensors] | None = None
    # A pattern of the names of parameters that no file holds, since the class computes them.
    made_by_class: str | None = None
    # Added to config.json after the model is written.
    quantization: Config | None = None

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.cls)

    def build(self) -> Any:
        """The model, with the same values every time."""
        config = transformers.AutoConfig.for_model(self.model_type, **self.config)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.model_class(config).eval()
        fill(model)
        return model.to(getattr(torch, self.dtype))

    def write(self, model: Any, directory: Path) -> Path:
        """Writes the model in the form of the hub, in three files with an index."""
        model.save_pretrained(directory)
        (single,) = directory.glob("*.safetensors")
        tensors = load_file(single)
        single.unlink()
        if self.hub is not None:
            tensors = self.hub(tensors, model)
        if self.quantization is not None:
            model.config.quantization_config = self.quantization
            model.config.save_pretrained(directory)
        return write_shards(directory, tensors, files=3)


def fill(model: Any) -> None:
    """Fills floating-point tensors with random values, small enough that outputs stay finite."""
    maker = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(0, 0.05, generator=maker)


# ---- files of the hub that differ from those of save_pretrained


def renamed(*pairs: tuple[str, str]) -> Callable[[Tensors, Any], Tensors]:
    """Applies each substitution to every name."""

    def rename(tensors: Tensors, model: Any) -> Tensors:
        made = {}
        for name, tensor in tensors.items():
            for pattern, text in pairs:
                name = re.sub(pattern, text, name)
            made[name] = tensor
        assert len(made) == len(tensors) and made.keys() != tensors.keys()
        return made

    return rename


def and_also(
    extra: dict[str, tuple[int, ...]], hub: Callable[[Tensors, Any], Tensors] | None = None
) -> Callable[[Tensors, Any], Tensors]:
    """Adds tensors that files on the hub have and the class drops."""

    def add(tensors: Tensors, model: Any) -> Tensors:
        made = hub(tensors, model) if hub else tensors
        assert not made.keys() & extra.keys()
        return made | {name: torch.ones(shape) for name, shape in extra.items()}

    return add


def moved_to_head(tensors: Tensors, model: Any) -> Tensors:
    """Stores a tied model with only the head."""
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    return tensors


def with_head_too(tensors: Tensors, model: Any) -> Tensors:
    """Stores a tied model under both names."""
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def transposed_experts(tensors: Tensors, model: Any) -> Tensors:
    """Stores experts as [expert, in, out]; save_pretrained stores them as [expert, out, in]."""
    return {
        n: t.transpose(1, 2).contiguous() if ".mlp.experts." in n else t for n, t in tensors.items()
    }


def convolutions_apart(tensors: Tensors, model: Any) -> Tensors:
    """Stores each joined convolution as three, with the sizes of queries, keys and values;
    save_pretrained divides it into three equal parts. (That of transformers 5.12 joins none.)"""
    made = dict(tensors)
    for name, joined in model.state_dict().items():
        if ".linear_attn.conv1d." in name:
            attention = model.get_submodule(name.removesuffix(".conv1d.weight"))
            sizes = [attention.key_dim, attention.key_dim, attention.value_dim]
            for kind, part in zip("qkv", joined.split(sizes), strict=False):
                made[name.replace("conv1d", f"{kind}_conv1d")] = part.clone()
    return made


def fp8(block: int) -> Callable[[Tensors, Any], Tensors]:
    """Stores every linear layer whose name ends in `_proj` or `_proj_with_mqa` as FP8 codes, with a
    scale for each block."""

    def quantize(tensors: Tensors, model: Any) -> Tensors:
        maker = torch.Generator().manual_seed(2)
        made = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
                blocks = [size // block for size in tensor.shape]
                made[name] = tensor.float().mul(100).to(torch.float8_e4m3fn)
                made[f"{name}_scale_inv"] = torch.rand(blocks, generator=maker)
        return made

    return quantize


def fp8_config(block: int) -> Config:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }


# ---- common parts of configurations

TEXT = {
    "vocab_size": 101,
    "hidden_size": 39,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EVEN_TEXT = TEXT | {"hidden_size": 42, "num_attention_heads": 7}
# For the tests of memory: tens of MB with 16 layers, untied.
LARGE_TEXT = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
MOE = TEXT | {"moe_intermediate_size": 13, "num_experts": 5, "num_experts_per_tok": 2}
EVEN_MOE = MOE | {"hidden_size": 42, "num_attention_heads": 7}
MLA = {
    "q_lora_rank": 11,
    "kv_lora_rank": 9,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 5,
    "v_head_dim": 7,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 3,
    "head_dim": 4,
}
FP8_DEEPSEEK = (
    MOE
    | MLA
    | {
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 16,
    }
)
FP8_QWEN = TEXT | {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 2,
    "head_dim": 128,
}
ENCODER = {
    "vocab_size": 101,
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "max_position_embeddings": 33,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "image_size": 15,
    "patch_size": 5,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

DENSE = (
    Family(
        "llama",
        "LlamaForCausalLM",
        "llama",
        TEXT | UNTIED,
        hub=and_also({"model.layers.1.self_attn.rotary_emb.inv_freq": (3,)}),
    ),
    Family("llama_tied", "LlamaForCausalLM", "llama", TEXT | TIED, "bfloat16"),
    Family("llama_tied_both_stored", "LlamaForCausalLM", "llama", TEXT | TIED, hub=with_head_too),
    Family("llama_tied_head_stored", "LlamaForCausalLM", "llama", TEXT | TIED, hub=moved_to_head),
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", EVEN_TEXT | TIED),
    Family("qwen3", "Qwen3ForCausalLM", "qwen3", TEXT | UNTIED),
    Family("mistral", "MistralForCausalLM", "mistral", TEXT, "bfloat16"),
    Family("phi3", "Phi3ForCausalLM", "phi3", EVEN_TEXT | UNTIED),
    Family("gemma2", "Gemma2ForCausalLM", "gemma2", TEXT),
    Family("gemma3_text", "Gemma3ForCausalLM", "gemma3_text", TEXT, "bfloat16"),
    Family("olmo2", "Olmo2ForCausalLM", "olmo2", EVEN_TEXT | UNTIED),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        "gpt2",
        {"vocab_size": 101, "n_embd": 21, "n_layer": 2, "n_head": 3, "n_positions": 33},
        hub=and_also({"h.0.attn.bias": (1, 1, 33, 33)}, renamed((r"^transformer\.", ""))),
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "gpt_neox",
        EVEN_TEXT,
        hub=and_also(
            {
                "gpt_neox.layers.0.attention.masked_bias": (),
                "gpt_neox.layers.0.attention.bias": (1, 1, 9, 9),
            }
        ),
    ),
    Family(
        "bloom",
        "BloomForCausalLM",
        "bloom",
        {"vocab_size": 101, "hidden_size": 21, "n_layer": 2, "n_head": 3},
        hub=renamed((r"^transformer\.", "")),
    ),
    Family(
        "falcon",
        "FalconForCausalLM",
        "falcon",
        {
            "vocab_size": 101,
            "hidden_size": 42,
            "num_hidden_layers": 2,
            "num_attention_heads": 7,
            "new_decoder_architecture": False,
            "bias": True,
        },
    ),
    Family(
        "opt",
        "OPTForCausalLM",
        "opt",
        {
            "vocab_size": 101,
            "hidden_size": 21,
            "ffn_dim": 53,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "word_embed_proj_dim": 13,
            "max_position_embeddings": 33,
        },
    ),
    Family("starcoder2", "Starcoder2ForCausalLM", "starcoder2", EVEN_TEXT),
    Family("stablelm", "StableLmForCausalLM", "stablelm", EVEN_TEXT | {"use_qkv_bias": True}),
    Family("cohere", "CohereForCausalLM", "cohere", EVEN_TEXT | {"use_qk_norm": True}),
    Family("glm4", "Glm4ForCausalLM", "glm4", TEXT, "bfloat16"),
)

MIXTURES = (
    Family("mixtral", "MixtralForCausalLM", "mixtral", TEXT | {"num_local_experts": 11}),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        EVEN_MOE | {"shared_expert_intermediate_size": 17},
    ),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", MOE, "bfloat16"),
    Family("olmoe", "OlmoeForCausalLM", "olmoe", EVEN_MOE),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        MOE | MLA,
        "bfloat16",
        hub=and_also({"model.layers.61.eh_proj.weight": (5, 3)}),
    ),
    Family(
        "deepseek_v3_fp8",
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        FP8_DEEPSEEK,
        "bfloat16",
        hub=fp8(16),
        quantization=fp8_config(16),
    ),
    Family(
        "qwen3_fp8",
        "Qwen3ForCausalLM",
        "qwen3",
        FP8_QWEN,
        "bfloat16",
        hub=fp8(128),
        quantization=fp8_config(128),
    ),
    Family("gpt_oss", "GptOssForCausalLM", "gpt_oss", MOE | {"num_local_experts": 5}, "bfloat16"),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        EVEN_MOE | {"moe_num_experts": 5, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    Family(
        "jamba",
        "JambaForCausalLM",
        "jamba",
        EVEN_TEXT
        | {
            "num_experts": 3,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 5,
            "mamba_dt_rank": 3,
            "use_mamba_kernels": False,
        },
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        "glm4_moe",
        MOE
        | {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        "dots1",
        MOE
        | {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "qwen3_next",
        MOE
        | {
            "shared_expert_intermediate_size": 17,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 6,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "num_hidden_layers": 4,
        },
    ),
    Family(
        "phimoe", "PhimoeForCausalLM", "phimoe", EVEN_TEXT | {"num_local_experts": 5, "head_dim": 6}
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        EVEN_TEXT | {"num_local_experts": 5, "rotary_dim": 4},
    ),
    Family(
        "granitemoe", "GraniteMoeForCausalLM", "granitemoe", EVEN_TEXT | {"num_local_experts": 5}
    ),
)

STATE_SPACES = (
    Family(
        "mamba",
        "MambaForCausalLM",
        "mamba",
        {
            "vocab_size": 101,
            "hidden_size": 21,
            "state_size": 5,
            "num_hidden_layers": 2,
            "time_step_rank": 3,
        },
    ),
    Family(
        "mamba2",
        "Mamba2ForCausalLM",
        "mamba2",
        {
            "vocab_size": 101,
            "hidden_size": 21,
            "state_size": 5,
            "num_hidden_layers": 2,
            "num_heads": 6,
            "head_dim": 7,
            "n_groups": 2,
        },
    ),
    Family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        "falcon_h1",
        EVEN_TEXT
        | {
            "mamba_d_ssm": 42,
            "mamba_n_heads": 6,
            "mamba_d_head": 7,
            "mamba_n_groups": 2,
            "mamba_d_state": 5,
        },
    ),
    Family(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        EVEN_TEXT
        | {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 7,
        },
        hub=convolutions_apart,
    ),
    Family(
        "olmo_hybrid_alike",
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        EVEN_TEXT
        | {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 6,
        },
    ),
    Family("hrm_text", "HrmTextForCausalLM", "hrm_text", TEXT),
)

ENCODERS = (
    Family(
        "bert",
        "BertForMaskedLM",
        "bert",
        ENCODER,
        hub=and_also(
            {"bert.embeddings.position_ids": (1, 33)},
            renamed(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
        ),
    ),
    Family("roberta", "RobertaForMaskedLM", "roberta", ENCODER),
    Family("nomic_bert", "NomicBertModel", "nomic_bert", ENCODER),
    Family("jina_embeddings_v3", "JinaEmbeddingsV3Model", "jina_embeddings_v3", ENCODER),
    Family("dinov2", "Dinov2Model", "dinov2", VISION | {"use_swiglu_ffn": True}),
    Family("vit", "ViTForImageClassification", "vit", VISION | {"num_labels": 3}),
    Family(
        "clip",
        "CLIPModel",
        "clip",
        {"text_config": ENCODER, "vision_config": VISION, "projection_dim": 11},
    ),
    Family("siglip", "SiglipModel", "siglip", {"text_config": ENCODER, "vision_config": VISION}),
)

ENCODER_DECODER = {
    "vocab_size": 101,
    "d_model": 42,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 7,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 53,
    "decoder_ffn_dim": 31,
    "max_position_embeddings": 33,
    "pad_token_id": 0,
}

OTHERS = (
    Family(
        "t5",
        "T5ForConditionalGeneration",
        "t5",
        {"vocab_size": 101, "d_model": 21, "d_kv": 5, "d_ff": 53, "num_layers": 2, "num_heads": 3},
    ),
    Family("bart", "BartForConditionalGeneration", "bart", ENCODER_DECODER),
    Family(
        "marian",
        "MarianMTModel",
        "marian",
        ENCODER_DECODER,
        made_by_class=r"embed_positions\.weight$",
    ),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        "whisper",
        ENCODER_DECODER
        | {"num_mel_bins": 9, "max_source_positions": 21, "max_target_positions": 13},
    ),
    Family(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        "wav2vec2",
        ENCODER
        | {
            "vocab_size": 11,
            "conv_dim": (7, 9),
            "conv_stride": (2, 2),
            "conv_kernel": (3, 3),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 6,
            "num_conv_pos_embedding_groups": 3,
        },
        hub=renamed(
            ("parametrizations.weight.original0", "weight_g"),
            ("parametrizations.weight.original1", "weight_v"),
        ),
    ),
)

QWEN_VISION = {
    "depth": 2,
    "num_heads": 3,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0}

QWEN3_VL_MOE = {
    "text_config": MOE | {"rope_parameters": MROPE, "decoder_sparse_step": 1},
    "vision_config": QWEN_VISION
    | {
        "hidden_size": 24,
        "out_hidden_size": 39,
        "intermediate_size": 29,
        "num_position_embeddings": 9,
        "deepstack_visual_indexes": [0],
    },
}
ERNIE_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
INKLING = TEXT | {
    "swa_num_attention_heads": 3,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 6,
    "d_rel": 4,
    "rel_extent": 9,
    "moe_intermediate_size": 13,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["sliding_attention", "full_attention"],
}

VISION_LANGUAGE = (
    Family(
        "llava",
        "LlavaForConditionalGeneration",
        "llava",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
        },
    ),
    Family(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        {
            "text_config": TEXT | {"model_type": "gemma"},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "projection_dim": 39,
        },
    ),
    Family(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            "text_config": TEXT | {"model_type": "gemma3_text"},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 9,
        },
    ),
    Family(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        "idefics3",
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION, "scale_factor": 3},
    ),
    Family(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        {
            "text_config": EVEN_TEXT | {"rope_parameters": MROPE},
            "vision_config": QWEN_VISION | {"embed_dim": 24, "hidden_size": 42},
        },
    ),
    Family(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {
            "text_config": EVEN_TEXT | {"rope_parameters": MROPE},
            "vision_config": QWEN_VISION
            | {"hidden_size": 24, "out_hidden_size": 42, "intermediate_size": 29},
        },
    ),
    Family(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        QWEN3_VL_MOE,
        hub=transposed_experts,
    ),
    Family(
        "qwen3_vl_moe_saved_by_v5",
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        QWEN3_VL_MOE,
    ),
    Family(
        "qwen3_vl_moe_square",
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        QWEN3_VL_MOE
        | {
            "text_config": QWEN3_VL_MOE["text_config"]
            | {"hidden_size": 42, "num_attention_heads": 7, "moe_intermediate_size": 21},
            "vision_config": QWEN3_VL_MOE["vision_config"] | {"out_hidden_size": 42},
        },
    ),
    Family(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "ernie4_5_vl_moe",
        {
            "text_config": EVEN_MOE
            | {
                "moe_num_experts": 5,
                "moe_intermediate_size": [13, 7],
                "moe_num_shared_experts": 1,
                "num_hidden_layers": 3,
                "head_dim": 8,
                "rope_parameters": ERNIE_ROPE,
            },
            "vision_config": QWEN_VISION | {"hidden_size": 24, "intermediate_size": 29},
        },
    ),
    Family(
        "kimi_k25",
        "Kimi_K25ForConditionalGeneration",
        "kimi_k25",
        {
            "text_config": MOE | MLA | {"model_type": "deepseek_v3"},
            "vision_config": {
                "hidden_size": 24,
                "intermediate_size": 29,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "patch_size": 2,
                "pos_emb_height": 3,
                "pos_emb_width": 3,
            },
            "projection_hidden_size": 24,
        },
        hub=renamed((r"^language_model\.model\.blocks\.", "language_model.model.layers.")),
    ),
    Family(
        "inkling",
        "InklingForConditionalGeneration",
        "inkling_mm_model",
        {
            "text_config": INKLING,
            "audio_config": {"n_mel_bins": 3, "mel_vocab_size": 7, "text_hidden_size": 39},
            "vision_config": {
                "text_hidden_size": 39,
                "patch_size": 4,
                "hidden_size": 42,
                "num_hidden_layers": 4,
                "num_attention_heads": 7,
            },
        },
    ),
    Family(
        "mistral_large4",
        "MistralLarge4ForConditionalGeneration",
        "mistral_large4",
        {
            "text_config": MOE
            | MLA
            | {"index_head_dim": 6, "index_n_heads": 2, "index_topk": 3, "n_group": 1},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 6},
        },
    ),
    Family(
        "step3p7",
        "Step3p7ForConditionalGeneration",
        "step3p7",
        {
            "text_config": MOE
            | {
                "num_local_experts": 5,
                "n_routed_experts": 5,
                "share_expert_dim": 17,
                "moe_layers_enum": "1",
            },
            "vision_config": VISION | {"num_attention_heads": 3, "hidden_size": 24},
        },
    ),
)

FAMILIES = DENSE + MIXTURES + STATE_SPACES + ENCODERS + OTHERS + VISION_LANGUAGE
