// The reports of this process to the `modicum watch` that runs it.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <list>
#include <string>
#include <system_error>
#include <thread>

#include "modicum/probe/probe.h"
#include "modicum/python/bindings.h"
#include "modicum/ranks/ranks.h"

namespace modicum::python {
namespace {

constexpr int64_t kHeapEveryNs = 100 * kNsPerMs;
constexpr int64_t kHeapShare = 400;  // the heap's reports take at most 1/400 of a core

// The report of the process with this pid.
struct ProcessReport {
  const int pid = getpid();
  OwnReport report;
};

// Reports the heap periodically until the process ends: phases begin and end too rarely to show
// memory that malloc has retained in between.
void report_heap_often(const Reporter& reporter) {
  SteadyClock clock;
  while (true) {
    const int64_t begin_ns = clock.now_ns();
    reporter.report_heap();
    clock.sleep_ns(std::max(kHeapEveryNs, kHeapShare * (clock.now_ns() - begin_ns)));
  }
}

// Runs report_heap_often in a thread of its own.
void follow_heap(const Reporter& reporter) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread must receive no signals
  try {
    std::thread(report_heap_often, std::cref(reporter)).detach();
  } catch (const std::system_error&) {
    // Without the thread, the heap is reported only where phases begin and end.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

const Reporter& reporter_here() {
  // Never destroyed: ledgers may return charges while the interpreter ends, and the ledgers that a
  // forked child has inherited refer to the parent's element.
  static auto& all = *new std::list<ProcessReport>();
  if (all.empty() || all.back().pid != getpid()) {
    ProcessReport& here = all.emplace_back();
    here.report.begin([] { return read_pss(getpid()).value_or(0); });
    if (here.report.reporter().is_on()) follow_heap(here.report.reporter());
  }
  return all.back().report.reporter();
}

void define_reporting(nb::module_& module) {
  nb::class_<ReportedPhase>(module, "ReportedPhase",
                            R"(A phase of this process, shown by the `modicum watch` that runs it.

Args:
    name: a phase of a plan's promise, or any other name.)")
      .def(
          "__init__",
          [](ReportedPhase* self, const std::string& name) {
            new (self) ReportedPhase(reporter_here(), name);
          },
          "name"_a)
      .def("end", &ReportedPhase::end, "Ends the phase; a second call does nothing.");
  module.def(
      "report_budget", [](uint64_t bytes) { reporter_here().set_budget(bytes); }, "bytes"_a,
      "The host budget of the node, shown by the `modicum watch` that runs this process; 0: none.");
}

}  // namespace modicum::python
