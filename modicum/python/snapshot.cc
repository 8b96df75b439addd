// Snapshot: what a save in the background reads. SaveParts.snapshot makes it.
#include <nanobind/stl/shared_ptr.h>

#include "modicum/python/caller_board.h"
#include "modicum/python/saving.h"

namespace modicum::python {

void define_snapshot(nb::module_& module) {
  nb::class_<Snapshot>(module, "Snapshot",
                       "The values that one rank's save in the background reads; see "
                       "SaveParts.snapshot.")
      .def_prop_ro("bytes", &Snapshot::bytes,
                   "The bytes that `charge` charges, with purpose `snapshot`.")
      .def(
          "charge",
          [](Snapshot& self, const std::shared_ptr<Ledger>& ledger) { self.charge(*ledger); },
          "ledger"_a, nb::keep_alive<1, 2>(),
          "Charges the window and its tables. Raises BudgetError if the ledger's limit is too low.")
      .def(
          "keep",
          [](Snapshot& self, nb::handle array) {
            return self.keep(bytes_of_array(writable(array, "")));
          },
          "memory"_a,
          "Immediately copies the values in `memory` that the save has yet to read. Returns False "
          "if the window is too small.")
      .def(
          "end", [](Snapshot& self) { without_the_lock([&] { self.end(); }); },
          "Declares that nothing more is read, and gives the window back.")
      .def_prop_ro(
          "waited_s",
          [](const Snapshot& self) { return static_cast<double>(self.waited_ns()) / kNsPerSecond; },
          "Seconds in which at least one thread of a step waited for the save to read.")
      .def_prop_ro("copied_bytes", &Snapshot::copied_bytes, "Bytes copied to the window.");
}

}  // namespace modicum::python
