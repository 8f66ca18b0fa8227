#include "elastic/agent/event_log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {

struct EventLog::Line {
  int64_t monotonic_ns = MonotonicNanoseconds();
  nlohmann::ordered_json fields = nlohmann::ordered_json::object();
};

EventLog::EventLog(UniqueFd fd, std::string path, std::string run_id)
    : fd_(std::move(fd)), path_(std::move(path)), run_id_(std::move(run_id)) {}

absl::StatusOr<EventLog> EventLog::Open(const std::string& path, const std::string& run_id) {
  if (path.empty()) return EventLog();
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!fd.valid()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot open the event log ", path, ": ", strerror(errno)));
  }
  return EventLog(std::move(fd), path, run_id);
}

void EventLog::GenerationStarted(uint64_t generation, const std::vector<Worker>& workers) {
  Line line;
  line.fields["ranks"] = nlohmann::ordered_json::array();
  line.fields["pids"] = nlohmann::ordered_json::array();
  for (const Worker& worker : workers) {
    line.fields["ranks"].push_back(worker.rank);
    line.fields["pids"].push_back(worker.pid);
  }
  Write("generation_started", generation, std::move(line));
}

void EventLog::WorkerExited(uint64_t generation, const Worker& worker, const ExitStatus& status) {
  Line line;
  line.fields["rank"] = worker.rank;
  line.fields["pid"] = worker.pid;
  if (status.signal != 0) {
    line.fields["signal"] = status.signal;
  } else {
    line.fields["exit_code"] = status.exit_code;
  }
  Write("worker_exited", generation, std::move(line));
}

void EventLog::Restarted(uint64_t generation, const Restart& restart) {
  Line line;
  line.fields["restart"] = restart.restart;
  line.fields["max_restarts"] = restart.max_restarts;
  line.fields["reason"] = restart.reason;
  Write("restart", generation, std::move(line));
}

void EventLog::FirstStepDone(uint64_t generation, const FirstStep& first_step) {
  Line line;
  line.monotonic_ns = first_step.monotonic_ns;
  line.fields["rank"] = first_step.rank;
  line.fields["step"] = first_step.step;
  Write("first_step", generation, std::move(line));
}

void EventLog::JobFinished(uint64_t generation, int exit_code) {
  Line line;
  line.fields["exit_code"] = exit_code;
  Write("job_finished", generation, std::move(line));
}

void EventLog::Write(const char* event, uint64_t generation, Line line) {
  if (!enabled()) return;
  nlohmann::ordered_json object;
  object["event"] = event;
  object["monotonic_ns"] = line.monotonic_ns;
  object["unix_time"] = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  object["run_id"] = run_id_;
  object["generation"] = generation;
  object.update(line.fields);
  // A run id or a reason may hold bytes that are no UTF-8: they must not end the job.
  std::string text = object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.push_back('\n');
  ssize_t written = 0;
  do {
    written = write(fd_.get(), text.data(), text.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(text.size())) return;
  fprintf(stderr, "ddprun: the event log %s ends here: %s\n", path_.c_str(),
          written < 0 ? strerror(errno) : "a line was cut short");
  fd_.reset();
}

}  // namespace ddp::elastic
