// Reads any text. If read_json accepts it, reread_json must accept it too.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "modicum/json/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto skip = [](modicum::JsonValue& root) { root.skip(); };
  try {
    modicum::read_json(text, skip);
  } catch (const modicum::JsonError&) {
    return 0;
  }
  modicum::reread_json(text, skip);
  return 0;
}
