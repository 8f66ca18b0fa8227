#include "elastic/agent/event_log.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "elastic/agent/say_line.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using Json = nlohmann::ordered_json;

// Adds torchrun's event names for the ends of workers and of the agent, for tools that know them.
void AddTorchelasticName(bool succeeded, const char* source, Json& fields) {
  fields["name"] = absl::StrCat("torchelastic.worker.status.", succeeded ? "SUCCEEDED" : "FAILED");
  fields["source"] = source;
}

}  // namespace

struct EventLog::Line {
  int64_t monotonic_ns = MonotonicNanoseconds();
  Json fields = Json::object();
};

absl::StatusOr<EventLog> EventLog::Open(const Options& options) {
  EventLog log;
  log.options_ = options;
  log.console_ = options.console;
  if (options.path.empty()) return log;
  log.file_.reset(open(options.path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!log.file_.valid()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot open the event log ", options.path, ": ", strerror(errno)));
  }
  if (options.writer != nullptr) log.AddToWriter();
  return log;
}

struct EventLog::Sink {
  Options options;
  FileWriter::FileId file = 0;
  size_t dropped = 0;  // number of lines dropped since the queue was full
  bool ended = false;  // by an error

  void Say(const std::string& line) const { options.say ? options.say(line) : SayOwnLine(line); }

  void Append(const std::string& text) {
    if (ended) return;
    if (options.writer->pending(file) + text.size() > kKeptBytes) {
      ++dropped;
    } else {
      options.writer->Append(file, text);
    }
  }

  void OnError(const std::string& why) {
    ended = true;
    Say(absl::StrCat("the event log ", options.path, " ends here: ", why));
  }

  void OnWritten() {
    if (dropped == 0 || options.writer->pending(file) > kKeptBytes / 2) return;
    Say(absl::StrCat("the event log ", options.path, " took no lines for a while: ",
                     std::exchange(dropped, 0), " of them were dropped"));
  }
};

void EventLog::AddToWriter() {
  sink_ = std::make_shared<Sink>();
  sink_->options = options_;
  const std::weak_ptr<Sink> weak = sink_;
  sink_->file = options_.writer->Add(std::move(file_), {.on_error =
                                                            [weak](const std::string& why) {
                                                              if (const auto sink = weak.lock())
                                                                sink->OnError(why);
                                                            },
                                                        .on_written =
                                                            [weak] {
                                                              if (const auto sink = weak.lock())
                                                                sink->OnWritten();
                                                            }});
}

void EventLog::Joining(uint64_t generation, const Offer& offer) {
  Line line;
  line.fields["nodes_min"] = offer.nodes_min;
  line.fields["nodes_max"] = offer.nodes_max;
  line.fields["nproc"] = offer.nproc;
  Write("joining", generation, std::move(line));
}

void EventLog::Joined(uint64_t generation, const Place& place) {
  group_rank_ = place.group_rank;
  Line line;
  line.fields["nonce"] = place.nonce;
  line.fields["nodes"] = place.nodes;
  line.fields["world_size"] = place.world_size;
  line.fields["first_rank"] = place.first_rank;
  line.fields["nproc"] = place.nproc;
  line.fields["restarts"] = place.restarts;
  Write("joined", generation, std::move(line));
}

void EventLog::GenerationStarted(uint64_t generation, const std::vector<Worker>& workers) {
  Line line;
  line.fields["ranks"] = Json::array();
  line.fields["pids"] = Json::array();
  for (const Worker& worker : workers) {
    line.fields["ranks"].push_back(worker.rank);
    line.fields["pids"].push_back(worker.pid);
  }
  Write("generation_started", generation, std::move(line));
}

void EventLog::FirstStepDone(uint64_t generation, const FirstStep& first_step) {
  Line line;
  line.monotonic_ns = first_step.monotonic_ns;
  line.fields["rank"] = first_step.rank;
  line.fields["step"] = first_step.step;
  Write("first_step", generation, std::move(line));
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
  if (!status.cause.empty()) line.fields["cause"] = status.cause;
  AddTorchelasticName(status.signal == 0 && status.exit_code == 0, "WORKER", line.fields);
  Write("worker_exited", generation, std::move(line));
}

void EventLog::WorkerHangs(uint64_t generation, const Hang& hang) {
  Line line;
  line.fields["rank"] = hang.rank;
  line.fields["phase"] = hang.phase;
  line.fields["stalled_s"] = absl::ToDoubleSeconds(hang.stalled_for);
  line.fields["longest_step_s"] = absl::ToDoubleSeconds(hang.longest_step);
  line.fields["waits_for_peers"] = hang.waits_for_peers;
  Write("hang", generation, std::move(line));
}

void EventLog::WorkerStraggles(uint64_t generation, const Straggler& straggler) {
  Line line;
  line.fields["rank"] = straggler.rank;
  line.fields["phase"] = straggler.phase;
  line.fields["factor"] = straggler.factor;
  Write("straggler", generation, std::move(line));
}

void EventLog::GenerationOver(uint64_t generation, const std::string& reason) {
  Line line;
  line.fields["reason"] = reason;
  Write("generation_over", generation, std::move(line));
}

void EventLog::Drains(uint64_t generation, const Drain& drain) {
  Line line;
  line.fields["reason"] = drain.reason;
  line.fields["stop_at_step"] = drain.stop_at_step;
  Write("drain", generation, std::move(line));
}

void EventLog::Evicted(uint64_t generation, const std::string& reason) {
  Line line;
  line.fields["reason"] = reason;
  Write("evicted", generation, std::move(line));
}

void EventLog::Restarted(uint64_t generation, const Restart& restart) {
  Line line;
  line.fields["restart"] = restart.restart;
  line.fields["max_restarts"] = restart.max_restarts;
  line.fields["reason"] = restart.reason;
  Write("restart", generation, std::move(line));
}

void EventLog::StoreOutOfReach(uint64_t generation, const std::string& reason) {
  Line line;
  line.fields["reason"] = reason;
  Write("store_out_of_reach", generation, std::move(line));
}

void EventLog::StoreBack(uint64_t generation, absl::Duration outage) {
  Line line;
  line.fields["outage_s"] = absl::ToDoubleSeconds(outage);
  Write("store_back", generation, std::move(line));
}

void EventLog::SignalReceived(uint64_t generation, int signal) {
  Line line;
  line.fields["signal"] = signal;
  Write("signal", generation, std::move(line));
}

void EventLog::JobFinished(uint64_t generation, int exit_code, const std::string& reason) {
  Line line;
  line.fields["exit_code"] = exit_code;
  if (!reason.empty()) line.fields["reason"] = reason;
  AddTorchelasticName(exit_code == 0, "AGENT", line.fields);
  Write("job_finished", generation, std::move(line));
}

void EventLog::Write(const char* event, uint64_t generation, Line line) {
  if (!enabled()) return;
  Json object;
  object["event"] = event;
  object["monotonic_ns"] = line.monotonic_ns;
  object["unix_time"] = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  object["run_id"] = options_.run_id;
  object["generation"] = generation;
  if (!options_.host.empty()) object["host"] = options_.host;
  if (!options_.role.empty()) object["role"] = options_.role;
  if (group_rank_ >= 0) object["group_rank"] = group_rank_;
  object.update(line.fields);
  // A run id or a reason may hold bytes that are no UTF-8: they must not end the job.
  std::string text = object.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.push_back('\n');
  if (file_.valid()) WriteToFile(text);
  if (sink_ != nullptr) sink_->Append(text);
  if (!console_) return;
  text.pop_back();
  options_.write_to_console ? options_.write_to_console(text) : SayLine(text);
}

void EventLog::WriteToFile(const std::string& text) {
  ssize_t written = 0;
  do {
    written = write(file_.get(), text.data(), text.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(text.size())) return;
  const char* const why = written < 0 ? strerror(errno) : "a line was cut short";
  file_.reset();
  const std::string line = absl::StrCat("the event log ", options_.path, " ends here: ", why);
  options_.say ? options_.say(line) : SayOwnLine(line);
}

}  // namespace ddp::elastic
