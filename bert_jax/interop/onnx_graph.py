"""BERT as an ONNX graph, built node by node from the parameters: no tracing, so every size that may vary does.

Opset 17, which runtimes since 2022 know. Batch and length are free; positions count from 0 inside the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop.huggingface_names import entries, to_hf
from bert_jax.interop.probe import INPUTS, outputs_of
from transformer_jax import masks

OPSET = 17
IR_VERSION = 8
"""The file format that belongs to the opset; a newer one would shut out older runtimes."""


def build(params: Mapping[str, Any], config: BertConfig, head: HeadConfig | None = None) -> onnx.ModelProto:
    """The model as ONNX, float32.

    Inputs, int64 [batch, length] each (for choice [batch, choices, length]): input_ids, attention_mask (0: padding),
    token_type_ids. Outputs: see `outputs_of`; scores of the vocabulary have no padding columns.

    Args:
      params: nested dict of arrays without Flax boxes, of pretraining or of the head's model.

    Raises:
      UserError: the tree has other tensors or shapes than `config` says.
    """
    published = to_hf(params, config, head)
    weights = {}
    for entry in entries(config, head):
        value = published[entry.name]
        weights["/".join(entry.path)] = value.T if entry.is_kernel else value
    return _Graph(weights, config, head).model()


class _Graph:
    """Collects nodes and weights; each method adds some nodes and returns the name of what they give."""

    def __init__(self, weights: Mapping[str, np.ndarray], config: BertConfig, head: HeadConfig | None):
        self.config, self.head = config, head
        self.nodes: list[onnx.NodeProto] = []
        self.initializers = [numpy_helper.from_array(np.ascontiguousarray(x), name) for name, x in weights.items()]
        self.constants: dict[str, str] = {}

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """A scalar or a vector of integers; the same value is stored once."""
        array = np.asarray(value, dtype)
        key = f"constant_{array.dtype}_{'_'.join(map(str, array.ravel()))}_{array.ndim}"
        if key not in self.constants:
            self.constants[key] = key
            self.initializers.append(numpy_helper.from_array(array, key))
        return key

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def model(self) -> onnx.ModelProto:
        ids, mask, types = INPUTS
        is_choice = self.head is not None and self.head.kind == "choice"
        if is_choice:
            length = self.add("Slice", self.add("Shape", ids), self.ints(2), self.ints(3))
            rows = self.add("Concat", self.ints(-1), length, axis=0)
            ids, mask, types = (self.add("Reshape", x, rows) for x in (ids, mask, types))
        x_BLH = self.embeddings(ids, types)
        allowed_B1LM = self.allowed(mask)
        for i in range(self.config.num_hidden_layers):
            x_BLH = self.layer(x_BLH, allowed_B1LM, f"encoder/layer_{i}")
        self.heads(x_BLH)
        axes = ["batch", "choices", "length"] if is_choice else ["batch", "length"]
        graph = helper.make_graph(
            self.nodes,
            "bert",
            [helper.make_tensor_value_info(name, TensorProto.INT64, axes) for name in INPUTS],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, self.shape(n)) for n in outputs_of(self.head)],
            self.initializers,
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="bert-jax"
        )

    def shape(self, output: str) -> list[Any]:
        c, head = self.config, self.head
        if head is not None and output == "logits":
            if head.kind == "choice":
                return ["batch", "choices"]
            return ["batch", *(["length"] if head.kind == "tagging" else []), head.num_outputs]
        shapes: dict[str, list[Any]] = {
            "last_hidden_state": ["batch", "length", c.hidden_size],
            "pooler_output": ["batch", c.hidden_size],
            "prediction_logits": ["batch", "length", c.vocab_size],
            "seq_relationship_logits": ["batch", 2],
            "start_logits": ["batch", "length"],
            "end_logits": ["batch", "length"],
        }
        return shapes[output]

    def embeddings(self, ids: str, types: str) -> str:
        length = self.add("Gather", self.add("Shape", ids), self.constant(1, np.int64), axis=0)
        places = self.add("Range", self.constant(0, np.int64), length, self.constant(1, np.int64))
        names = (f"embeddings/{name}/embedding" for name in ("word", "position", "token_type"))
        word, position, kind = (
            self.add("Gather", table, index, axis=0) for table, index in zip(names, (ids, places, types), strict=True)
        )
        return self.norm(self.add("Add", self.add("Add", word, position), kind), "embeddings/norm")

    def allowed(self, mask: str) -> str:
        """bool [B, 1, L, M]: query and key are no padding, as `transformer_jax.masks.same_sequence` of one sequence."""
        real_BL = self.add("Cast", mask, to=TensorProto.BOOL)
        queries = self.add("Unsqueeze", real_BL, self.ints(1, 3))
        return self.add("And", queries, self.add("Unsqueeze", real_BL, self.ints(1, 2)))

    def layer(self, x_BLH: str, allowed_B1LM: str, name: str) -> str:
        context = self.dense(self.attention(x_BLH, allowed_B1LM, f"{name}/attention"), f"{name}/attention/output")
        x_BLH = self.norm(self.add("Add", x_BLH, context), f"{name}/attention_norm")
        inner = self.activation(self.dense(x_BLH, f"{name}/feed_forward/intermediate"))
        x = self.add("Add", x_BLH, self.dense(inner, f"{name}/feed_forward/output"))
        return self.norm(x, f"{name}/feed_forward_norm")

    def attention(self, x_BLH: str, allowed_B1LM: str, name: str) -> str:
        c = self.config

        def heads(part: str, order: list[int]) -> str:
            x = self.dense(x_BLH, f"{name}/{part}")
            split = self.add("Reshape", x, self.ints(0, 0, c.num_attention_heads, c.head_dim))
            return self.add("Transpose", split, perm=order)

        query = self.add("Mul", heads("query", [0, 2, 1, 3]), self.constant(1 / math.sqrt(c.head_dim)))
        scores_BNLM = self.add("MatMul", query, heads("key", [0, 2, 3, 1]))
        scores_BNLM = self.add("Where", allowed_B1LM, scores_BNLM, self.constant(masks.FORBIDDEN))
        weights_BNLM = self.add("Softmax", scores_BNLM, axis=-1)
        context_BNLD = self.add("MatMul", weights_BNLM, heads("value", [0, 2, 1, 3]))
        context = self.add("Transpose", context_BNLD, perm=[0, 2, 1, 3])
        return self.add("Reshape", context, self.ints(0, 0, c.hidden_size))

    def heads(self, x_BLH: str) -> None:
        head = self.head
        if head is None:
            self.add("Identity", x_BLH, output="last_hidden_state")
            pooled = self.pooled(x_BLH, "pooler_output")
            self.dense(pooled, "nsp", output="seq_relationship_logits")
            x = self.norm(self.activation(self.dense(x_BLH, "mlm/transform")), "mlm/norm")
            words = self.add("Transpose", "embeddings/word/embedding", perm=[1, 0])
            self.add("Add", self.add("MatMul", x, words), "mlm/bias", output="prediction_logits")
            return
        x = self.pooled(x_BLH) if head.has_pooler else x_BLH
        if head.kind == "span":
            both = self.dense(x, "head")
            for i, output in enumerate(outputs_of(head)):
                self.add("Gather", both, self.constant(i, np.int64), axis=2, output=output)
        elif head.kind == "choice":
            leading = self.add("Slice", self.add("Shape", INPUTS[0]), self.ints(0), self.ints(2))
            self.add("Reshape", self.dense(x, "head"), leading, output="logits")
        else:
            self.dense(x, "head", output="logits")

    def pooled(self, x_BLH: str, output: str = "") -> str:
        first = self.add("Gather", x_BLH, self.constant(0, np.int64), axis=1)
        return self.add("Tanh", self.dense(first, "pooler"), output=output)

    def dense(self, x: str, name: str, output: str = "") -> str:
        return self.add("Add", self.add("MatMul", x, f"{name}/kernel"), f"{name}/bias", output=output)

    def norm(self, x: str, name: str) -> str:
        eps = self.config.layer_norm_eps
        return self.add("LayerNormalization", x, f"{name}/scale", f"{name}/bias", axis=-1, epsilon=eps)

    def activation(self, x: str) -> str:
        kind = self.config.hidden_act
        if kind == "relu":
            return self.add("Relu", x)
        if kind == "gelu":
            inner = self.add("Erf", self.add("Mul", x, self.constant(math.sqrt(0.5))))
        else:
            assert kind == "gelu_new", kind
            cube = self.add("Mul", self.add("Mul", x, x), x)
            sum_ = self.add("Add", x, self.add("Mul", cube, self.constant(0.044715)))
            inner = self.add("Tanh", self.add("Mul", sum_, self.constant(math.sqrt(2 / math.pi))))
        half = self.add("Mul", x, self.constant(0.5))
        return self.add("Mul", half, self.add("Add", inner, self.constant(1.0)))
