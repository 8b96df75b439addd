#include "modicum/python/arrays.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "modicum/base/base.h"

namespace modicum::python {

AnyArray writable(nb::handle array, const std::string& fqn) {
  Py_buffer view;
  if (PyObject_CheckBuffer(array.ptr()) != 0) {
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_WRITABLE | PyBUF_STRIDES) != 0) {
      PyErr_Clear();
      fail(Category::usage, "the array given for a tensor is read-only", {.tensor = fqn});
    }
    PyBuffer_Release(&view);
  }
  AnyArray taken;
  if (!nb::try_cast(array, taken, false)) {
    fail(Category::usage, "the array given for a tensor is no contiguous host array",
         {.tensor = fqn});
  }
  return taken;
}

void require_target(size_t index, size_t targets) {
  if (index < targets) return;
  fail(Category::usage, "memory is given for an unknown target",
       {.expected = fmt::format("an index below {}", targets), .got = std::to_string(index)});
}

nb::object view_of(std::span<std::byte> bytes) {
  return nb::steal(PyMemoryView_FromMemory(reinterpret_cast<char*>(bytes.data()),
                                           static_cast<Py_ssize_t>(bytes.size()), PyBUF_WRITE));
}

nb::dict by_purpose(const Footprint& footprint) {
  nb::dict bytes;
  for (const Owner& owner : owners_of(footprint)) bytes[owner.purpose.c_str()] = owner.bytes;
  return bytes;
}

Footprint from_purposes(const std::map<std::string, uint64_t>& bytes) {
  Footprint footprint;
  std::map<std::string, uint64_t> unknown = bytes;
  for (size_t i = 0; i < footprint.bytes.size(); ++i) {
    const auto node = unknown.extract(std::string(purpose_name(static_cast<Purpose>(i))));
    if (!node.empty()) footprint.bytes[i] = node.mapped();
  }
  if (unknown.empty()) return footprint;
  std::vector<std::string_view> known;
  for (size_t i = 0; i < footprint.bytes.size(); ++i) {
    known.push_back(purpose_name(static_cast<Purpose>(i)));
  }
  fail(Category::usage, "a purpose of memory is unknown",
       {.expected = fmt::format("one of {}", fmt::join(known, ", ")),
        .got = printable(unknown.begin()->first)});
}

}  // namespace modicum::python
