// What this process reports about itself to the `modicum watch` that runs it.
#include <unistd.h>

#include <list>
#include <string>

#include "modicum/probe/probe.h"
#include "modicum/python/bindings.h"
#include "modicum/ranks/ranks.h"

namespace modicum::python {
namespace {

struct Here {
  const int pid = getpid();
  OwnReport report;
};

}  // namespace

const Reporter& reporter_here() {
  // Never destroyed: ledgers may return entries while the interpreter ends, and those that a forked
  // child has inherited refer to its parent's.
  static auto& all = *new std::list<Here>();
  if (all.empty() || all.back().pid != getpid()) {
    all.emplace_back().report.begin([] { return read_pss(getpid()).value_or(0); });
  }
  return all.back().report.reporter();
}

void define_reporting(nb::module_& module) {
  nb::class_<ReportedPhase>(module, "ReportedPhase",
                            R"(A phase of this process, shown by the `modicum watch` that runs it.

Args:
    name: as in a plan's promise, or any other.)")
      .def(
          "__init__",
          [](ReportedPhase* made, const std::string& name) {
            new (made) ReportedPhase(reporter_here(), name);
          },
          "name"_a)
      .def("end", &ReportedPhase::end, "Ends it; a second call does nothing.");
  module.def(
      "report_budget", [](uint64_t bytes) { reporter_here().set_budget(bytes); }, "bytes"_a,
      "The host budget of the node, shown by the `modicum watch` that runs this process; 0: none.");
}

}  // namespace modicum::python
