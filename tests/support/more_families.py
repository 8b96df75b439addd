"""More model types, for tests that apply to every model: a class, and a tiny configuration that
many classes share. The families of `families.py`, which all kinds of tests load, have
configurations of their own."""

from collections.abc import Mapping

from families import (
    ENCODER,
    ENCODER_DECODER,
    EVEN_MOE,
    EVEN_TEXT,
    MLA,
    MOE,
    MROPE,
    QWEN_VISION,
    TEXT,
    VISION,
    Config,
    Family,
)

AUDIO = {
    "vocab_size": 11,
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "pad_token_id": 0,
    "conv_dim": (7, 9),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 3,
}
EXPERTS = EVEN_MOE | {"num_local_experts": 5, "n_routed_experts": 5}
LATENT = MOE | MLA | {"num_local_experts": 6}
TWO_STACKS = ENCODER_DECODER | {"num_layers": 2}
LOCAL = {
    "vocab_size": 101,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 3,
    "max_position_embeddings": 33,
    "attention_types": [[["global", "local"], 1]],
}
T5 = {"vocab_size": 101, "d_model": 21, "d_kv": 5, "d_ff": 53, "num_layers": 2, "num_heads": 3}

TOWERS = {"text_config": EVEN_TEXT, "vision_config": VISION}
MROPE_VISION = QWEN_VISION | {"hidden_size": 24, "out_hidden_size": 42, "intermediate_size": 29}
MROPE_TOWERS = {
    "text_config": EVEN_TEXT | {"rope_parameters": MROPE},
    "vision_config": MROPE_VISION,
}
MROPE_MOE = MROPE_TOWERS | {"text_config": EXPERTS | {"rope_parameters": MROPE}}
Q_FORMER = {
    "text_config": ENCODER,
    "vision_config": VISION,
    "qformer_config": ENCODER | {"encoder_hidden_size": 42},
    "num_query_tokens": 3,
}
SOUND = {
    "num_mel_bins": 9,
    "d_model": 42,
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "encoder_layers": 1,
    "encoder_attention_heads": 7,
    "encoder_ffn_dim": 31,
    "max_source_positions": 21,
}
SOUND_TOWERS = {"text_config": EVEN_TEXT | {"model_type": "qwen2"}, "audio_config": SOUND}

# By model type. Every second one is stored in bf16.
DENSE = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "biogpt": "BioGptForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "codegen": "CodeGenForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cwm": "CwmForCausalLM",
    "doge": "DogeForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "flint": "FlintForCausalLM",
    "fuyu": "FuyuForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox_japanese": "GPTNeoXJapaneseForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "modernbert-decoder": "ModernBertDecoderForCausalLM",
    "mpt": "MptForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
    "xmod": "XmodForCausalLM",
}
MIXTURES = {
    "aria_text": "AriaTextForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "jetmoe": "JetMoeForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
}
OF_EXPERTS = {
    "afmoe": "AfmoeForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "kolibri1": "Kolibri1ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "mellum": "MellumForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
}
OF_LATENT = {
    "axk1": "AXK1ForCausalLM",
    "axk2": "AXK2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
}
STATE_SPACES = {
    "bailing_hybrid": "BailingHybridForCausalLM",
    "beam": "BeamForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "xlstm": "xLSTMForCausalLM",
}
ENCODERS = {
    "albert": "AlbertForMaskedLM",
    "big_bird": "BigBirdForCausalLM",
    "convbert": "ConvBertForMaskedLM",
    "deberta": "DebertaForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM",
    "electra": "ElectraForCausalLM",
    "esm": "EsmForMaskedLM",
    "eurobert": "EuroBertForMaskedLM",
    "fnet": "FNetForMaskedLM",
    "gte": "GteForMaskedLM",
    "ibert": "IBertForMaskedLM",
    "layoutlm": "LayoutLMForMaskedLM",
    "longformer": "LongformerForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "mpnet": "MPNetForMaskedLM",
    "nystromformer": "NystromformerForMaskedLM",
    "rembert": "RemBertForCausalLM",
    "roformer": "RoFormerForCausalLM",
    "tapas": "TapasForMaskedLM",
    "ultrabert": "UltrabertForMaskedLM",
}
IMAGES = {
    "beit": "BeitForImageClassification",
    "data2vec-vision": "Data2VecVisionForImageClassification",
    "deit": "DeiTForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    "ijepa": "IJepaForImageClassification",
    "imagegpt": "ImageGPTForImageClassification",
    "vit_msn": "ViTMSNForImageClassification",
}
SOUNDS = {
    "data2vec-audio": "Data2VecAudioForCTC",
    "hubert": "HubertForCTC",
    "sew": "SEWForCTC",
    "sew-d": "SEWDForCTC",
    "unispeech": "UniSpeechForCTC",
    "wav2vec2-conformer": "Wav2Vec2ConformerForCTC",
    "wavlm": "WavLMForCTC",
}
OTHER_SOUNDS = {
    "audio-spectrogram-transformer": "ASTForAudioClassification",
    "wav2vec2-bert": "Wav2Vec2BertForCTC",
}
ENCODER_DECODERS = {
    "m2m_100": "M2M100ForConditionalGeneration",
    "mbart": "MBartForCausalLM",
    "nllb-moe": "NllbMoeForConditionalGeneration",
    "pegasus_x": "PegasusXForConditionalGeneration",
}

VISION_LANGUAGE = {
    "altclip": "AltCLIPModel",
    "aria": "AriaForConditionalGeneration",
    "blip": "BlipForConditionalGeneration",
    "clipseg": "CLIPSegModel",
    "deepseek_vl": "DeepseekVLForConditionalGeneration",
    "idefics2": "Idefics2ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "lighton_ocr": "LightOnOcrForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_next_video": "LlavaNextVideoForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "metaclip_2": "MetaClip2ForImageClassification",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mllama": "MllamaForCausalLM",
    "owlv2": "Owlv2Model",
    "owlvit": "OwlViTModel",
    "paddleocr_vl": "PaddleOCRVLForConditionalGeneration",
    "siglip2": "Siglip2ForImageClassification",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "video_llama_3": "VideoLlama3ForConditionalGeneration",
    "video_llava": "VideoLlavaForConditionalGeneration",
    "vipllava": "VipLlavaForConditionalGeneration",
}
OF_MROPE = {
    "aya_vision": "AyaVisionForConditionalGeneration",
    "glm46v": "Glm46VForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm_ocr": "GlmOcrForConditionalGeneration",
}
OF_Q_FORMER = {
    "blip-2": "Blip2ForConditionalGeneration",
    "instructblip": "InstructBlipForConditionalGeneration",
}
SOUND_LANGUAGE = {
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "glmasr": "GlmAsrForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
}
SOUND_ENCODERS = {"lasr_ctc": "LasrForCTC", "parakeet_ctc": "ParakeetForCTC"}


def _families(classes: Mapping[str, str], config: Config) -> tuple[Family, ...]:
    dtypes = ("float32", "bfloat16")
    return tuple(
        Family(model_type, cls, model_type, config, dtypes[number % 2])
        for number, (model_type, cls) in enumerate(classes.items())
    )


MORE_FAMILIES = (
    *_families(DENSE, TEXT),
    *_families(MIXTURES, TEXT),
    *_families(OF_EXPERTS, EXPERTS),
    *_families(OF_LATENT, LATENT),
    *_families(STATE_SPACES, TEXT),
    *_families(ENCODERS, TEXT),
    *_families(IMAGES, TEXT),
    *_families(SOUNDS, AUDIO),
    *_families(OTHER_SOUNDS, TEXT),
    *_families(ENCODER_DECODERS, TWO_STACKS),
    *_families(VISION_LANGUAGE, TOWERS),
    *_families(OF_MROPE, MROPE_TOWERS),
    *_families({"glm4v_moe": "Glm4vMoeForConditionalGeneration"}, MROPE_MOE),
    *_families(OF_Q_FORMER, Q_FORMER),
    *_families(SOUND_LANGUAGE, SOUND_TOWERS),
    *_families(SOUND_ENCODERS, {"encoder_config": SOUND, "decoder_config": EVEN_TEXT}),
    *_families({"gpt_neo": "GPTNeoForCausalLM"}, LOCAL),
    *_families({"switch_transformers": "SwitchTransformersForConditionalGeneration"}, T5),
)
