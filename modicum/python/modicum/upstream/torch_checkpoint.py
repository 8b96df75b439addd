"""torch.distributed.checkpoint's files, as of torch 2.13: the names that their pickles may hold."""

METADATA = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem _StorageInfo"
REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
REBUILD_TYPED = "torch._tensor _rebuild_from_type_v2"
"""Of a tensor with attributes: its function, class, arguments and attributes."""
ORDERED_DICT = "collections OrderedDict"
LAYOUT = "torch.serialization _get_layout"
GETATTR = frozenset(("builtins getattr", "__builtin__ getattr"))
"""From Python 3.11.0 to 3.11.2 a member of an enumeration is pickled as `getattr` of its class."""
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

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip
"""The classes of torch's typed storages, by the dtype of their elements."""
