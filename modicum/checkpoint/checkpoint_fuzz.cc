// Parses a checkpoint's files and the records of a saved checkpoint. The first
// byte of the input says which:
//
//   f  a safetensors file          m  manifest.json of a checkpoint
//   h  a header of such a file     s  state.json of a checkpoint
//   i  an index of two files       k  COMMIT of a checkpoint
//   c  config.json, next to a      j  the journal of a conversion
//      valid file
//
// Every text must be accepted or refused with an Error other than INTERNAL. An accepted checkpoint
// must have consistent sizes. An accepted record must stay the same when it is written and read.
#include <cstddef>
#include <cstdint>
#include <string>

#include "modicum/base/base.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/run.h"
#include "modicum/checkpoint/test_files_doubles.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

void open(MemoryFileSystem& files) {
  const Checkpoint checkpoint = open_checkpoint(files, "dir");
  const Manifest& manifest = checkpoint.manifest;
  for (const StoredTensor& stored : manifest.tensors) {
    MODICUM_ASSERT(stored.at.bytes() == checked_bytes(stored.spec.dtype, stored.spec.shape));
    MODICUM_ASSERT(stored.at.end <= manifest.files[stored.at.file].identity.size_bytes);
  }
}

void open_committed(const std::string& commit) {
  MemoryFileSystem files;
  files.put("dir/manifest.json", record_json({.step = 1, .uuid = "a", .tool = "modicum"}));
  files.put("dir/COMMIT", commit);
  MODICUM_ASSERT(open_run_checkpoint(files, "dir").record.uuid == "a");
}

void continue_conversion(const std::string& journal) {
  MemoryFileSystem files;
  files.put("/.out.journal", journal);
  files.put("/.out.partial/a", "four");
  Hasher hasher;
  hasher.add("inputs");
  ConversionJournal conversion(files, "/out",
                               {hasher.digest(), {}, [](const SaveOwner&) { return true; }});
  const ConvertedFile* const file = conversion.finished("a", 4);
  MODICUM_ASSERT(file == nullptr || file->bytes == 4);
  conversion.recorded();
}

void parse(char kind, const std::string& text) {
  MemoryFileSystem files;
  if (kind == 'f') files.put("dir/model.safetensors", text);
  if (kind == 'h') files.put("dir/model.safetensors", file_bytes(text, text.size() % 64));
  if (kind == 'i') {
    files.put("dir/model.safetensors.index.json", text);
    files.put("dir/a.safetensors", file_with({{"a", 3}, {"b", 5}}));
    files.put("dir/b.safetensors", file_with({{"c", 8}}));
  }
  if (kind == 'c') {
    files.put("dir/model.safetensors", file_with({{"lm_head.weight", 4}}));
    files.put("dir/config.json", text);
  }
  if (kind == 'm') {
    const CheckpointRecord record = parse_record(text);
    MODICUM_ASSERT(parse_record(record_json(record)) == record);
  } else if (kind == 's') {
    const std::string again = state_json(parse_state(text));
    MODICUM_ASSERT(state_json(parse_state(again)) == again);
  } else if (kind == 'k') {
    open_committed(text);
  } else if (kind == 'j') {
    continue_conversion(text);
  } else {
    open(files);
  }
}

}  // namespace
}  // namespace modicum

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  try {
    modicum::parse(static_cast<char>(data[0]),
                   std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
  } catch (const modicum::Error& error) {
    MODICUM_ASSERT(error.category() != modicum::Category::internal);
  }
  return 0;
}
