# SPDX-License-Identifier: Apache-2.0
"""Linear layers and embeddings in transformers whose weight is read by other code than the layer, and which must not be
packed.

For example, T5 reads the dtype of the weight, Mamba multiplies by it, RWKV scales it in place, and Swin V2 creates a
table with the dtype of a submodule's first parameter. A call of the layer does not reveal this, so the classes are
listed here by name. A test compares the tables of linear layers with the source of the installed transformers.

Output heads to whose dtype a model casts their input are packed: the packed layer says the dtype (typed_linear.py).
"""

from __future__ import annotations

import functools

from torch import nn

from lowbit.quant.kinds import kind_of
from lowbit.quant.output_head import head_layers
from lowbit.quant.quant_embedding import EMBEDDING
from lowbit.quant.quant_linear import LINEAR
from lowbit.quant.typed_linear import say_dtype

READ_BY = {
    "wo": (
        "kosmos2_5.Kosmos2_5VisionMlp longt5.LongT5DenseActDense mt5.MT5DenseActDense mt5.MT5DenseGatedActDense "
        "pix2struct.Pix2StructVisionMlp pix2struct.Pix2StructTextDenseGatedActDense "
        "pop2piano.Pop2PianoDenseActDense pop2piano.Pop2PianoDenseGatedActDense "
        "switch_transformers.SwitchTransformersDenseActDense t5.T5DenseActDense t5.T5DenseGatedActDense "
        "udop.UdopDenseActDense udop.UdopDenseGatedActDense umt5.UMT5DenseActDense umt5.UMT5DenseGatedActDense"
    ),
    "lm_head": (
        "gemma4_assistant.Gemma4AssistantForCausalLM gemma4_unified_assistant.Gemma4UnifiedAssistantForCausalLM "
        "hy_v4.HYV4ForCausalLM"
    ),
    "weights_proj": (
        "axk2.AXK2Indexer deepseek_v32.DeepseekV32Indexer dots3_note.Dots3NoteTextIndexer "
        "glm5_next.Glm5NextTextIndexer glm_moe_dsa.GlmMoeDsaIndexer hy_v4.HYV4Indexer "
        "mistral_large4.MistralLarge4TextIndexer"
    ),
    "kernel": (
        "data2vec.TDNNLayer unispeech_sat.TDNNLayer wav2vec2.TDNNLayer wav2vec2_bert.TDNNLayer "
        "wav2vec2_conformer.TDNNLayer wavlm.TDNNLayer"
    ),
    "patch_embedding": (
        "cosmos3_edge.Cosmos3EdgeVisionEmbeddings muse_glimmer.MuseGlimmerVisionPatchEmbedder "
        "muse_spark.MuseSparkVisionPatchEmbedder siglip2.Siglip2VisionEmbeddings"
    ),
    "dt_proj": "falcon_mamba.FalconMambaMixer jamba.JambaMambaMixer mamba.MambaMixer",
    "embed": (
        "esmfold2.EsmFold2RelativePositionEncoding._relative_position_one_hot "
        "esmfold2.EsmFold2RelativePositionEncoding esmfold2.EsmFold2MSAEncoder"
    ),
    "embedding_proj_layer": (
        "colmodernvbert.ColModernVBertForRetrieval colpali.ColPaliForRetrieval colqwen2.ColQwen2ForRetrieval"
    ),
    "k_proj": (
        "conditional_detr.ConditionalDetrMHAttentionMap detr.DetrMHAttentionMap maskformer.MaskFormerDetrMHAttentionMap"
    ),
    "proj": "ernie4_5_vl_moe.Ernie4_5_VLMoePatchEmbed jev.JevForDecision neomme.NeoMMEMultiVectorHead",
    "project_q": (
        "unispeech.UniSpeechForPreTraining wav2vec2.Wav2Vec2ForPreTraining "
        "wav2vec2_conformer.Wav2Vec2ConformerForPreTraining"
    ),
    "rel_pos_bias": (
        "layoutlmv2.LayoutLMv2Encoder._calculate_1d_position_embeddings "
        "layoutlmv3.LayoutLMv3Encoder._cal_1d_pos_emb "
        "pp_doclayout_v2.PPDocLayoutV2ReadingOrderEncoder._cal_1d_pos_emb"
    ),
    "audio_latent_proj": (
        "gradium_phonon_tts.GradiumPhononTTSModel.embed_audio_latents pocket_tts.PocketTTSModel.embed_audio_latents"
    ),
    "audio_prompt_proj": "gradium_phonon_tts.GradiumPhononTTSModel pocket_tts.PocketTTSModel",
    "continuous_position_bias_mlp.parameters": (
        "swin2sr.Swin2SRSelfAttention.create_coords_table_and_index "
        "swinv2.Swinv2SelfAttention.create_coords_table_and_index"
    ),
    "pair_proj": "esmfold2.EsmFold2DiffusionConditioning.compute_pair_repr esmfold2.EsmFold2LanguageModelEncoder",
    "q_proj": "gpt_neo.GPTNeoFlashAttention2 gptj.GPTJFlashAttention2",
    "rel_pos_x_bias rel_pos_y_bias": (
        "layoutlmv2.LayoutLMv2Encoder._calculate_2d_position_embeddings layoutlmv3.LayoutLMv3Encoder._cal_2d_pos_emb"
    ),
    "atom_linear": "esmfold2.EsmFold2AtomEncoder.embed_atoms",
    "attention.output feed_forward.value": "rwkv.RwkvModel._rescale_layers",
    "classifier": "longcat_flash.LongcatFlashTopkRouter",
    "coords_linear": "esmfold2.EsmFold2DiffusionModule",
    "decoder dense": "mobilebert.MobileBertLMPredictionHead",
    "dense": "bloom.BloomAttention",
    "dense_4h_to_h": "bloom.BloomMLP",
    "distogram_head": "esmfold2.EsmFold2Model",
    "esmc.parameters": "esmfold2.EsmFold2Model._compute_lm_hidden_states",
    "in_proj": "deberta.DisentangledSelfAttention",
    "input_linear": "granite_speech5.GraniteSpeech5Encoder",
    "itm_head text_projection vision_projection": "blip_2.Blip2ForImageTextRetrieval",
    "k_linear": "dab_detr.DabDetrMHAttentionMap",
    "k_proj out_proj q_proj v_proj": "wavlm.WavLMAttention.torch_multi_head_self_attention",
    "noise_proj": "esmfold2.EsmFold2DiffusionConditioning",
    "pae_head": "esmfold2.EsmFold2ConfidenceHead._build_pair_and_single",
    "query_key": "reformer.LSHSelfAttention._query_per_attn_head",
    "query_key_value": "falcon.FalconFlashAttention2",
    "text_projection": "blip_2.Blip2TextModelWithProjection",
    "token_bonds": "esmfold2.EsmFold2InputEmbedder",
    "unembedding_projection": "neomme.NeoMMEForMaskedLM",
    "value": "reformer.LSHSelfAttention._value_per_attn_head",
    "vision_projection": "blip_2.Blip2VisionModelWithProjection",
    "vision_tower.parameters": "hunyuan_vl.HunYuanVLModel.get_image_features",
    "wg": "hunyuan_v1_moe.HunYuanMoEV1Gate",
}
"""Layers, and the methods that read their weights, as ``folder.Class.method`` in ``transformers.models``. Without a
method, it is ``forward``. A layer's name with dots is the end of its path; ``part.parameters`` stands for the layer
with the first parameter of the submodule ``part``."""
DTYPE_READ_BY = {
    "lm_head": (
        "falcon_mamba.FalconMambaForCausalLM mamba.MambaForCausalLM mamba2.Mamba2ForCausalLM xlstm.xLSTMForCausalLM"
    ),
}
"""Layers of which these methods read the dtype alone."""
TABLES_READ_BY = {
    "embed_tokens": (
        "diffusion_gemma.DiffusionGemmaDecoderModel gemma4.Gemma4TextModel.get_per_layer_inputs "
        "qwen4_exp.Qwen4ExpTextModel.reverse_embedding"
    ),
    "language_model.embed_tokens": "gemma4.Gemma4Model",
}
"""The same for embeddings of tokens, which are packed with an output head that is tied to them."""
_PARAMETERS = "parameters"
Tables = tuple[tuple[str, str], ...]
_READ: Tables = (*READ_BY.items(), *TABLES_READ_BY.items())
_DTYPE_READ: Tables = tuple(DTYPE_READ_BY.items())


def weights_that_are_read(model: nn.Module) -> dict[int, str]:
    """Return, by the id of the layer, a sentence that names the class that reads its weight. An output head is among
    them if a class reads the embedding that it is tied to."""
    found: dict[int, str] = {}
    for module in model.modules():
        for path in _read_by(type(module), _READ):
            for layer in _layers_at(module, path):
                if layer is not None and kind_of(layer) in (LINEAR, EMBEDDING):
                    found[id(layer)] = f"{type(module).__name__} reads its weight"
    tied = head_layers(model)
    for reason in {found[id(layer)] for layer in tied if id(layer) in found}:
        found |= {id(layer): reason for layer in tied}
    return found


def say_dtypes(model: nn.Module) -> None:
    """Let packed layers of which a model reads the dtype alone say that of the model."""
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    for module in model.modules() if dtype is not None else ():
        for path in _read_by(type(module), _DTYPE_READ):
            for layer in _layers_at(module, path):
                if layer is not None:
                    say_dtype(layer, dtype)


def _layers_at(module: nn.Module, path: str) -> list[nn.Module | None]:
    """Return the layers of a module that an entry of the table names."""
    part, _, last = path.rpartition(".")
    if last == _PARAMETERS:
        owner = module._modules.get(part)
        return [] if owner is None else [next((one for one in owner.modules() if one._parameters), None)]
    if not part:
        return [module._modules.get(path)]
    return [layer for name, layer in module.named_modules() if f".{name}".endswith(f".{path}")]


@functools.cache
def _read_by(cls: type, tables: Tables) -> frozenset[str]:
    """Return the layers that tables list for this class. Methods that a subclass overrides do not count."""
    layers: set[str] = set()
    replaced: set[str] = set()
    for base in cls.__mro__:
        for method, read in _methods(tables).get(_name(base), {}).items():
            if method not in replaced:
                layers |= read
        replaced |= vars(base).keys()
    return frozenset(layers)


def _name(cls: type) -> str:
    """Return ``folder.Class`` for a class in ``transformers.models``, and an empty string for any other."""
    package, models, folder, *_ = f"{cls.__module__}...".split(".")
    return f"{folder}.{cls.__qualname__}" if (package, models) == ("transformers", "models") else ""


@functools.cache
def _methods(tables: Tables) -> dict[str, dict[str, set[str]]]:
    """Return tables by class: for each of its methods, the layers."""
    table: dict[str, dict[str, set[str]]] = {}
    for layers, readers in tables:
        for reader in readers.split():
            folder, cls, *method = reader.split(".")
            of_class = table.setdefault(f"{folder}.{cls}", {})
            of_class.setdefault(method[0] if method else "forward", set()).update(layers.split())
    return table
