"""Files of torch.distributed.checkpoint, torch 2.13: the names that their pickles may contain."""

METADATA = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem _StorageInfo"
REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
REBUILD_TYPED = "torch._tensor _rebuild_from_type_v2"
"""Rebuilds a tensor with attributes from (function, class, arguments, attributes)."""
ORDERED_DICT = "collections OrderedDict"
LAYOUT = "torch.serialization _get_layout"
GETATTR = frozenset(("builtins getattr", "__builtin__ getattr"))
"""Python 3.11.0 to 3.11.2 pickle an enum member as `getattr(class, name)`."""
MEMORY_FORMAT = f"{METADATA} _MEM_FORMAT_ENCODING"

PICKLED = frozenset(
    (
        *(
            f"{METADATA} {name}"
            for name in (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata",
                "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta",
            )
        ),
        MEMORY_FORMAT, STORAGE_INFO, REBUILD_TENSOR, LAYOUT,
        "torch Size", ORDERED_DICT,
        "pathlib PosixPath", "pathlib._local PosixPath",
    )
)  # fmt: skip
"""The classes and functions, as "module name", that `.metadata` and its archives may name. A pickle
with any other name is refused."""

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip
"""The dtype of the elements, by the class of torch's typed storages."""
