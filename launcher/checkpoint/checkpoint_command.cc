#include "launcher/checkpoint/checkpoint_command.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "elastic/agent/say_line.h"
#include "elastic/checkpoint/file_system/posix_file_system.h"
#include "elastic/checkpoint/inspect/difference.h"
#include "elastic/checkpoint/inspect/folder_listing.h"
#include "elastic/checkpoint/inspect/prune.h"
#include "elastic/checkpoint/inspect/report.h"
#include "elastic/checkpoint/inspect/stored_checkpoint.h"
#include "elastic/checkpoint/inspect/verification.h"
#include "launcher/checkpoint/progress_line.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/output/printable.h"
#include "launcher/subcommands/checkpoint_flags.h"

namespace ddp::launcher {
namespace {

using Verb = CheckpointRequest::Verb;

constexpr int kWrong = 1;
constexpr int kUsageError = 2;
constexpr int kCannot = 3;

constexpr char kHelp[] =
    R"(Usage: ddprun checkpoint ls FOLDER [--json]
       ddprun checkpoint show CHECKPOINT [--json]
       ddprun checkpoint verify CHECKPOINT [--all] [--json]
       ddprun checkpoint diff CHECKPOINT CHECKPOINT [--json]
       ddprun checkpoint prune FOLDER --keep-last=N [--dry-run] [--json]

FOLDER holds all checkpoints of a job. CHECKPOINT is the folder of one of them, or FOLDER: then the
newest checkpoint in it.

  ls      The checkpoints: step, generation, run id, world size, bytes, age, complete or not. Reads
          manifests and sizes of files, and no tensors.
  show    The saved state and its tensors: dtype, shape, bytes, file and hash.
  verify  Reads and hashes every tensor, and names each one that is damaged.
          --all
              Every checkpoint of FOLDER, newest first, not only the newest.
  diff    Tensors that differ, are missing or have another type, with the largest difference of
          floating types, and fields of the saved state that differ. Tensors with equal hashes are
          equal.
  prune   Deletes older complete checkpoints, and tells which. The newest one that can be read
          always stays: it is verified first.
          --keep-last=N
              The newest N complete checkpoints stay.
          --dry-run
              Tells what would be deleted, and deletes nothing.
  --json  As JSON, one line.

To turn a checkpoint into state_dicts of PyTorch, or back: tools/python/ddp_checkpoint.py.

Exit code: 0 when all is well, 1 when a checkpoint is damaged or two differ, 2 for a mistake on the
command line, 3 when a folder or a checkpoint cannot be read or deleted. A program named checkpoint
is started by: ddprun -- checkpoint
)";

absl::Status UsageError(const std::string& text) {
  return absl::InvalidArgumentError(absl::StrCat(text, "; see ddprun checkpoint --help"));
}

// Returns the number of the verb in kCheckpointVerbs, which has the order of the enum.
std::optional<Verb> VerbOf(const std::string& word) {
  const auto found = std::find(kCheckpointVerbs.begin(), kCheckpointVerbs.end(), word);
  if (found == kCheckpointVerbs.end()) return std::nullopt;
  return static_cast<Verb>(found - kCheckpointVerbs.begin());
}

const CheckpointFlag* FindFlag(const std::string& name, const std::string& verb) {
  for (const CheckpointFlag& flag : kCheckpointFlags) {
    if (name == flag.name && (*flag.verb == '\0' || verb == flag.verb)) return &flag;
  }
  return nullptr;
}

// Reads the flag at arguments[i] and its value, and moves `i` to the last word of the two.
absl::Status ReadFlag(const std::vector<std::string>& arguments, const std::string& verb, size_t& i,
                      CheckpointRequest& request) {
  const std::string& argument = arguments[i];
  const size_t equals = argument.find('=');
  const std::string name =
      absl::StrReplaceAll(argument.substr(2, equals - std::min<size_t>(2, equals)), {{"_", "-"}});
  const CheckpointFlag* const flag = FindFlag(name, verb);
  if (flag == nullptr || (!flag->takes_value && equals != std::string::npos)) {
    return UsageError(absl::StrCat("unknown flag ", Shown(argument), " of checkpoint ", verb));
  }
  if (name == "json") request.json = true;
  if (name == "all") request.all = true;
  if (name == "dry-run") request.dry_run = true;
  if (!flag->takes_value) return absl::OkStatus();
  std::string value;
  if (equals != std::string::npos) {
    value = argument.substr(equals + 1);
  } else if (i + 1 < arguments.size()) {
    value = arguments[++i];
  }
  int64_t number = 0;
  if (!ParseInteger(value, &number) || number < 1 || number > 1'000'000'000) {
    return UsageError(absl::StrCat("--", name, ": ",
                                   value.empty() ? "a value is missing" : Shown(value),
                                   value.empty() ? "" : " is not a number from 1"));
  }
  request.keep_last = static_cast<int>(number);
  return absl::OkStatus();
}

absl::Status CheckComplete(const CheckpointRequest& request, const std::string& verb) {
  const size_t wanted = request.verb == Verb::kDiff ? 2 : 1;
  if (request.paths.size() < wanted) {
    return UsageError(
        absl::StrCat("checkpoint ", verb, " needs ", wanted == 2 ? "two checkpoints" : "a folder"));
  }
  if (request.paths.size() > wanted) {
    return UsageError(absl::StrCat("unexpected ", Shown(request.paths[wanted])));
  }
  if (request.verb == Verb::kPrune && request.keep_last == 0) {
    return UsageError("checkpoint prune needs --keep-last=N");
  }
  return absl::OkStatus();
}

void SayHere(const std::string& line) {
  elastic::SayLine(absl::StrCat("ddprun checkpoint: ", Printable(line)));
}

int Complain(const absl::Status& status) {
  SayHere(std::string(status.message()));
  if (absl::IsInvalidArgument(status)) return kUsageError;
  return absl::IsDataLoss(status) ? kWrong : kCannot;
}

void Print(const std::string& text) { std::fputs(text.c_str(), stdout); }

// Shows on a terminal how far a reading is.
class TerminalProgress {
 public:
  explicit TerminalProgress(std::string title) : line_(std::move(title), clock_.Now()) {}
  ~TerminalProgress() {
    if (shown_) Write("\r\x1b[K");
  }
  TerminalProgress(const TerminalProgress&) = delete;
  TerminalProgress& operator=(const TerminalProgress&) = delete;

  elastic::InspectProgress Callback() {
    if (!is_terminal_) return nullptr;
    return [this](uint64_t done, uint64_t total) {
      const std::optional<std::string> text = line_.Update(done, total, clock_.Now());
      if (!text.has_value()) return;
      shown_ = true;
      Write(absl::StrCat("\r", *text, "\x1b[K"));
    };
  }

 private:
  static void Write(const std::string& text) {
    (void)!::write(STDERR_FILENO, text.data(), text.size());
  }

  const MonotonicClock clock_;
  const bool is_terminal_ = ::isatty(STDERR_FILENO) == 1;
  ProgressLine line_;
  bool shown_ = false;
};

int List(const CheckpointRequest& request) {
  const std::string& root = request.paths[0];
  elastic::PosixFileSystem files(root);
  const absl::StatusOr<elastic::FolderListing> listing = elastic::ListFolder(files, root);
  if (!listing.ok()) return Complain(listing.status());
  Print(request.json ? elastic::ListingJson(root, *listing)
                     : elastic::ListingTable(root, *listing, absl::ToUnixSeconds(absl::Now())));
  return 0;
}

int Show(const CheckpointRequest& request) {
  elastic::PosixFileSystem files;
  const absl::StatusOr<std::string> folder = elastic::FindCheckpoint(files, request.paths[0]);
  if (!folder.ok()) return Complain(folder.status());
  const absl::StatusOr<elastic::Manifest> manifest = elastic::ReadManifestOf(files, *folder);
  if (!manifest.ok()) return Complain(manifest.status());
  Print(request.json ? elastic::ManifestJson(*folder, *manifest)
                     : elastic::ManifestTable(*folder, *manifest));
  return 0;
}

int Verify(const CheckpointRequest& request) {
  elastic::PosixFileSystem files;
  absl::StatusOr<std::vector<std::string>> folders =
      elastic::FindCheckpoints(files, request.paths[0]);
  if (!folders.ok()) return Complain(folders.status());
  if (!request.all) folders->resize(1);
  std::vector<elastic::Verification> verifications;
  int exit_code = 0;
  for (const std::string& folder : *folders) {
    absl::StatusOr<elastic::Verification> verification = [&] {
      TerminalProgress progress(absl::StrCat("verifying ", elastic::BaseName(folder)));
      return elastic::VerifyCheckpoint(files, folder, progress.Callback());
    }();
    if (!verification.ok()) {
      exit_code = std::max(exit_code, Complain(verification.status()));
      continue;
    }
    if (!verification->is_whole()) exit_code = std::max(exit_code, kWrong);
    verifications.push_back(*std::move(verification));
    if (!request.json) Print(elastic::VerificationTable({verifications.back()}));
  }
  if (request.json) Print(elastic::VerificationJson(verifications));
  return exit_code;
}

int Diff(const CheckpointRequest& request) {
  elastic::PosixFileSystem files;
  const absl::StatusOr<std::string> a = elastic::FindCheckpoint(files, request.paths[0]);
  if (!a.ok()) return Complain(a.status());
  const absl::StatusOr<std::string> b = elastic::FindCheckpoint(files, request.paths[1]);
  if (!b.ok()) return Complain(b.status());
  const absl::StatusOr<elastic::CheckpointDifference> difference = [&] {
    TerminalProgress progress("comparing");
    return elastic::CompareCheckpoints(files, *a, *b, progress.Callback());
  }();
  if (!difference.ok()) return Complain(difference.status());
  Print(request.json ? elastic::DifferenceJson(*difference)
                     : elastic::DifferenceTable(*difference));
  return difference->is_empty() ? 0 : kWrong;
}

int Prune(const CheckpointRequest& request) {
  const std::string& root = request.paths[0];
  elastic::PosixFileSystem files(root);
  const absl::StatusOr<elastic::PruneResult> result = [&] {
    TerminalProgress progress("verifying the newest checkpoint");
    return elastic::Prune(files, root, {.keep_last = request.keep_last, .dry_run = request.dry_run},
                          progress.Callback());
  }();
  if (!result.ok()) return Complain(result.status());
  Print(request.json ? elastic::PruneJson(*result) : elastic::PruneTable(*result));
  return result->all_removed() ? 0 : kCannot;
}

}  // namespace

absl::StatusOr<CheckpointRequest> ParseCheckpointArguments(
    const std::vector<std::string>& arguments) {
  CheckpointRequest request;
  for (const std::string& argument : arguments) {
    if (argument == "-h" || argument == "--help") {
      request.help = true;
      return request;
    }
  }
  const std::string verbs = absl::StrJoin(kCheckpointVerbs, ", ");
  if (arguments.empty()) return UsageError(absl::StrCat("a verb is missing: one of ", verbs));
  const std::string& verb = arguments[0];
  const std::optional<Verb> known = VerbOf(verb);
  if (!known.has_value()) {
    return UsageError(absl::StrCat("unknown verb ", Shown(verb), ": expected one of ", verbs));
  }
  request.verb = *known;
  for (size_t i = 1; i < arguments.size(); ++i) {
    if (arguments[i].compare(0, 2, "--") == 0) {
      DDP_RETURN_IF_ERROR(ReadFlag(arguments, verb, i, request));
    } else if (arguments[i].empty()) {
      return UsageError("an empty path");
    } else {
      request.paths.push_back(arguments[i]);
      // The rules about links hold below a root without a slash at its end.
      std::string& path = request.paths.back();
      while (path.size() > 1 && path.back() == '/') path.pop_back();
    }
  }
  DDP_RETURN_IF_ERROR(CheckComplete(request, verb));
  return request;
}

int RunCheckpointCommand(const std::vector<std::string>& arguments) {
  const absl::StatusOr<CheckpointRequest> request =
      ParseCheckpointArguments(std::vector<std::string>(arguments.begin() + 1, arguments.end()));
  if (!request.ok()) return Complain(request.status());
  if (request->help) {
    Print(kHelp);
    return 0;
  }
  switch (request->verb) {
    case Verb::kList:
      return List(*request);
    case Verb::kShow:
      return Show(*request);
    case Verb::kVerify:
      return Verify(*request);
    case Verb::kDiff:
      return Diff(*request);
    case Verb::kPrune:
      return Prune(*request);
  }
  return kUsageError;
}

}  // namespace ddp::launcher
