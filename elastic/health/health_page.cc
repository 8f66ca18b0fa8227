#include "elastic/health/health_page.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/status_macros.h"

namespace ddp::elastic {
namespace {

constexpr uint64_t kMagic = 0x4547'4150'5044'4844;  // "DHDPPAGE", little-endian
constexpr uint32_t kVersion = 4;
constexpr size_t kPageBytes = 4096;

// A write takes some dozens of instructions. After this many torn reads the writer has died or been
// stopped inside a write, or the page is forged.
constexpr int kReadTriesMax = 1000;
constexpr int kReadTriesBeforeYield = 100;

constexpr int64_t kNoStop = std::numeric_limits<int64_t>::max();

constexpr uint32_t kStopAware = 1;
constexpr uint32_t kStoppedAsAsked = 2;
constexpr uint32_t kTellsWaits = 4;

// A text in 8-byte words, each read and written as a whole.
using SaveErrorWords = std::array<std::atomic<uint64_t>, HealthPage::kSaveErrorBytes / 8>;

}  // namespace

// Shared by processes of different builds: change kVersion with every change of this layout.
struct HealthPage::Layout {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;

  // Cache line that the agent writes: a step, kStopAtOnce or kNoStop.
  alignas(64) std::atomic<int64_t> stop_at_step;

  // Cache lines that the worker writes. Marks are bits that a generation only sets.
  alignas(64) std::atomic<uint32_t> marks;
  // Sequence lock over all fields below up to `life`: odd while a write is in progress.
  std::atomic<uint64_t> sequence;
  std::atomic<uint64_t> generation;
  std::atomic<int64_t> commits;  // in this generation
  std::atomic<int64_t> step;
  std::atomic<int64_t> first_step;
  std::atomic<int64_t> first_commit_ns;
  std::atomic<int64_t> last_commit_ns;
  std::atomic<int64_t> longest_step_ns;
  std::atomic<int64_t> step_start_ns;
  std::atomic<int64_t> booked_until_ns;
  std::atomic<int64_t> phase_start_ns;
  std::atomic<uint32_t> phase;
  std::array<std::atomic<int64_t>, kPhaseCount> phase_total_ns;  // until the last commit
  std::array<std::atomic<int64_t>, kPhaseCount> phase_since_commit_ns;
  std::atomic<int64_t> failed_saves;
  std::atomic<int64_t> failed_saves_in_a_row;
  SaveErrorWords save_error;  // ends at the first NUL, or with the array
  std::atomic<int64_t> max_world_size;

  // Only the worker locks this mutex. The list pointers of a robust mutex are in the page. A
  // process that can write the page chooses what an unlock overwrites, so readers only look at the
  // lock word.
  alignas(64) pthread_mutex_t life;

  void BeginWrite() {
    sequence.store(sequence.load(std::memory_order_relaxed) | 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
  }
  void EndWrite() {
    sequence.store(sequence.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }

  // Call these between BeginWrite and EndWrite.
  void BookPhase(int64_t now_ns);
  void SwitchPhase(Phase to, int64_t now_ns);
  int64_t CloseStep();
};

namespace {

// A single thread writes these fields, so relaxed order is enough.
int64_t Get(const std::atomic<int64_t>& value) { return value.load(std::memory_order_relaxed); }
void Set(std::atomic<int64_t>& value, int64_t to) { value.store(to, std::memory_order_relaxed); }

// The page may hold any number, so these wrap around instead of overflowing.
int64_t Plus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
int64_t Minus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
void Add(std::atomic<int64_t>& value, int64_t more) { Set(value, Plus(Get(value), more)); }

int64_t Microseconds(const std::atomic<int64_t>& nanoseconds) {
  return std::max<int64_t>(Get(nanoseconds), 0) / 1000;
}

bool ContinuesCharacter(char byte) { return (byte & 0xC0) == 0x80; }

// Returns `text` up to its first NUL. If it is too long, the middle is dropped: a message begins
// with its subject and ends with its reason. Cuts between UTF-8 characters.
std::string Shortened(absl::string_view text) {
  constexpr absl::string_view kGap = "...";
  constexpr size_t kHead = HealthPage::kSaveErrorBytes / 4;
  constexpr size_t kTail = HealthPage::kSaveErrorBytes - kHead - kGap.size();
  text = text.substr(0, text.find('\0'));
  if (text.size() <= HealthPage::kSaveErrorBytes) return std::string(text);
  size_t head = kHead;
  while (head > 0 && ContinuesCharacter(text[head])) --head;
  size_t tail = text.size() - kTail;
  while (tail < text.size() && ContinuesCharacter(text[tail])) ++tail;
  return absl::StrCat(text.substr(0, head), kGap, text.substr(tail));
}

void SetText(SaveErrorWords& words, absl::string_view text) {
  const std::string kept = Shortened(text);
  std::array<char, HealthPage::kSaveErrorBytes> bytes{};
  std::memcpy(bytes.data(), kept.data(), kept.size());
  for (size_t i = 0; i < words.size(); ++i) {
    uint64_t word = 0;
    std::memcpy(&word, &bytes[i * sizeof(word)], sizeof(word));
    words[i].store(word, std::memory_order_relaxed);
  }
}

std::string GetText(const SaveErrorWords& words) {
  std::array<char, HealthPage::kSaveErrorBytes> bytes{};
  for (size_t i = 0; i < words.size(); ++i) {
    const uint64_t word = words[i].load(std::memory_order_relaxed);
    std::memcpy(&bytes[i * sizeof(word)], &word, sizeof(word));
  }
  return std::string(bytes.begin(), std::find(bytes.begin(), bytes.end(), '\0'));
}

Phase ValidPhase(uint32_t value) {
  return value < kPhaseCount ? static_cast<Phase>(value) : Phase::kOther;
}

absl::Status InitializeLifeMutex(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  int error = pthread_mutexattr_init(&attributes);
  if (error == 0) error = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  if (error == 0) error = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  if (error == 0) error = pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (error == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("health page: no robust mutex: ", std::strerror(error)));
}

// Returns a deleted file in `folder`, with room for a page.
UniqueFd MakeDeletedFile(const std::string& folder) {
  std::string path = absl::StrCat(folder, "/ddp-health-XXXXXX");
  UniqueFd fd(mkostemp(path.data(), O_CLOEXEC));
  if (!fd.valid()) return fd;
  unlink(path.c_str());
  const int error = posix_fallocate(fd.get(), 0, kPageBytes);
  if (error == 0) return fd;
  errno = error;
  return UniqueFd();
}

// Returns true when the machine lacks something that it may have again later.
bool IsTransientError(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOSPC ||
         error == EDQUOT;
}

// Returns the file of a page. A worker cannot shrink it, which would end the agent by SIGBUS. Where
// a filter of system calls refuses memfd_create(), the file is a deleted one without that guard.
// kUnimplemented: this system refuses all of it; kResourceExhausted: another try may succeed.
absl::StatusOr<UniqueFd> MakeFile() {
  UniqueFd fd(memfd_create("ddp-health", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.valid() && ftruncate(fd.get(), kPageBytes) == 0 &&
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
    return fd;
  }
  bool is_transient = IsTransientError(errno);
  std::string why = absl::StrCat("memfd_create: ", std::strerror(errno));
  const char* const temporary = std::getenv("TMPDIR");
  for (const char* const folder : {"/dev/shm", temporary == nullptr ? "/tmp" : temporary}) {
    fd = MakeDeletedFile(folder);
    if (fd.valid()) return fd;
    is_transient |= IsTransientError(errno);
    absl::StrAppend(&why, "; a file in ", folder, ": ", std::strerror(errno));
  }
  why = absl::StrCat("no memory to share with a worker: ", why);
  return is_transient ? absl::ResourceExhaustedError(why) : absl::UnimplementedError(why);
}

HealthPage::Worker ReadLife(const pthread_mutex_t& mutex) {
  // On every architecture of glibc the lock word is the first member. Its format is the kernel's:
  // the owner's thread id and the died flag.
  const uint32_t word =
      __atomic_load_n(reinterpret_cast<const uint32_t*>(&mutex), __ATOMIC_ACQUIRE);
  if ((word & FUTEX_OWNER_DIED) != 0) return HealthPage::Worker::kDied;
  if ((word & FUTEX_TID_MASK) != 0) return HealthPage::Worker::kAttached;
  return HealthPage::Worker::kNotAttached;
}

}  // namespace

HealthPage::HealthPage(UniqueFd fd, Layout* layout) : fd_(std::move(fd)), layout_(layout) {
  static_assert(std::is_standard_layout_v<Layout>);
  static_assert(sizeof(Layout) <= kPageBytes);
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
}

HealthPage::HealthPage(HealthPage&& other) noexcept
    : fd_(std::move(other.fd_)), layout_(std::exchange(other.layout_, nullptr)) {}

HealthPage& HealthPage::operator=(HealthPage&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(layout_, other.layout_);
  return *this;
}

HealthPage::~HealthPage() {
  if (layout_ != nullptr) munmap(layout_, kPageBytes);
}

absl::StatusOr<HealthPage> HealthPage::Create() {
  DDP_ASSIGN_OR_RETURN(UniqueFd fd, MakeFile());
  void* memory = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("health page: mmap: ", std::strerror(errno)));
  }
  auto* layout = new (memory) Layout();
  HealthPage page(std::move(fd), layout);
  layout->magic = kMagic;
  layout->version = kVersion;
  page.BeginGeneration(0);
  if (absl::Status status = InitializeLifeMutex(&layout->life); !status.ok()) return status;
  return page;
}

absl::StatusOr<HealthPage> HealthPage::Map(int fd_number) {
  UniqueFd fd(fd_number);
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "descriptor ", fd_number, " is not a health page: fstat: ", std::strerror(errno)));
  }
  if (!S_ISREG(info.st_mode) || info.st_size != static_cast<off_t>(kPageBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("descriptor ", fd_number,
                                                   " is not a health page: it is no file of ",
                                                   kPageBytes, " bytes"));
  }
  if (fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0) {
    return absl::InternalError(absl::StrCat("health page: fcntl: ", std::strerror(errno)));
  }
  void* memory = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) {
    return absl::InternalError(absl::StrCat("health page: mmap: ", std::strerror(errno)));
  }
  HealthPage page(std::move(fd), static_cast<Layout*>(memory));
  if (page.layout_->magic != kMagic) {
    return absl::InvalidArgumentError(
        absl::StrCat("descriptor ", fd_number, " is not a health page: wrong magic number"));
  }
  if (page.layout_->version != kVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("the health page has version ", page.layout_->version, ", this program knows ",
                     kVersion, ": build the trainer and ddprun from the same release"));
  }
  return page;
}

void HealthPage::BeginGeneration(uint64_t generation) {
  const int64_t now_ns = MonotonicNanoseconds();
  layout_->stop_at_step.store(kNoStop, std::memory_order_relaxed);
  layout_->marks.store(0, std::memory_order_relaxed);
  layout_->BeginWrite();
  layout_->generation.store(generation, std::memory_order_relaxed);
  for (std::atomic<int64_t>* value :
       {&layout_->commits, &layout_->step, &layout_->first_step, &layout_->first_commit_ns,
        &layout_->last_commit_ns, &layout_->longest_step_ns, &layout_->failed_saves,
        &layout_->failed_saves_in_a_row, &layout_->max_world_size}) {
    Set(*value, 0);
  }
  SetText(layout_->save_error, "");
  for (std::atomic<int64_t>& total : layout_->phase_total_ns) Set(total, 0);
  for (std::atomic<int64_t>& total : layout_->phase_since_commit_ns) Set(total, 0);
  for (std::atomic<int64_t>* value :
       {&layout_->step_start_ns, &layout_->phase_start_ns, &layout_->booked_until_ns}) {
    Set(*value, now_ns);
  }
  layout_->phase.store(static_cast<uint32_t>(Phase::kStartup), std::memory_order_relaxed);
  layout_->EndWrite();
}

void HealthPage::RequestStop(int64_t stop_at_step) {
  layout_->stop_at_step.store(stop_at_step, std::memory_order_release);
}

void HealthPage::ClearStop() { RequestStop(kNoStop); }

// Adds the time until now to the current phase.
void HealthPage::Layout::BookPhase(int64_t now_ns) {
  const Phase current = ValidPhase(phase.load(std::memory_order_relaxed));
  Add(phase_since_commit_ns[static_cast<size_t>(current)], Minus(now_ns, Get(booked_until_ns)));
  Set(booked_until_ns, now_ns);
  if (!IsPartOfStep(current)) Set(step_start_ns, now_ns);
}

void HealthPage::Layout::SwitchPhase(Phase to, int64_t now_ns) {
  BookPhase(now_ns);
  phase.store(static_cast<uint32_t>(to), std::memory_order_relaxed);
  Set(phase_start_ns, now_ns);
}

// Adds the phase times since the last commit to the totals. Returns the duration of the step.
int64_t HealthPage::Layout::CloseStep() {
  int64_t took_ns = 0;
  for (size_t i = 0; i < kPhaseCount; ++i) {
    const int64_t stay_ns = Get(phase_since_commit_ns[i]);
    Add(phase_total_ns[i], stay_ns);
    Set(phase_since_commit_ns[i], 0);
    if (IsPartOfStep(static_cast<Phase>(i))) took_ns = Plus(took_ns, stay_ns);
  }
  return took_ns;
}

void HealthPage::CommitStep(int64_t step) {
  const int64_t now_ns = MonotonicNanoseconds();
  const int64_t commits = Get(layout_->commits);
  layout_->BeginWrite();
  layout_->BookPhase(now_ns);
  const int64_t took_ns = layout_->CloseStep();
  // A trainer need not name phases: its first commit ends the startup.
  if (phase() == Phase::kStartup) layout_->SwitchPhase(Phase::kOther, now_ns);
  Set(layout_->step, step);
  if (commits == 0) {
    Set(layout_->first_step, step);
    Set(layout_->first_commit_ns, now_ns);
  } else {
    Set(layout_->longest_step_ns, std::max(Get(layout_->longest_step_ns), took_ns));
  }
  Set(layout_->step_start_ns, now_ns);
  Set(layout_->last_commit_ns, now_ns);
  Set(layout_->commits, Plus(commits, 1));
  layout_->EndWrite();
}

void HealthPage::EnterPhase(Phase phase) {
  const int64_t now_ns = MonotonicNanoseconds();
  if (phase == Phase::kStartup && Get(layout_->commits) > 0) phase = Phase::kOther;
  layout_->BeginWrite();
  layout_->SwitchPhase(phase, now_ns);
  layout_->EndWrite();
}

Phase HealthPage::phase() const {
  return ValidPhase(layout_->phase.load(std::memory_order_relaxed));
}

void HealthPage::Progress() { EnterPhase(phase()); }

void HealthPage::RecordSave(absl::string_view error) {
  layout_->BeginWrite();
  if (error.empty()) {
    Set(layout_->failed_saves_in_a_row, 0);
  } else {
    Add(layout_->failed_saves, 1);
    Add(layout_->failed_saves_in_a_row, 1);
    SetText(layout_->save_error, error);
  }
  layout_->EndWrite();
}

void HealthPage::SetMaxWorldSize(int64_t ranks) {
  layout_->BeginWrite();
  Set(layout_->max_world_size, ranks);
  layout_->EndWrite();
}

void HealthPage::TellWaits() {
  if ((layout_->marks.load(std::memory_order_relaxed) & kTellsWaits) != 0) return;
  layout_->marks.fetch_or(kTellsWaits, std::memory_order_release);
}

bool HealthPage::ShouldStop() {
  const uint32_t marks = layout_->marks.load(std::memory_order_relaxed);
  if ((marks & kStoppedAsAsked) != 0) return true;
  const int64_t stop_at = layout_->stop_at_step.load(std::memory_order_acquire);
  const bool committed = Get(layout_->commits) > 0 && Get(layout_->step) >= stop_at;
  const bool stop = stop_at == kStopAtOnce || (stop_at != kNoStop && committed);
  const uint32_t now = kStopAware | (stop ? kStoppedAsAsked : 0);
  // Written only on a change: else the cache line would move between worker and agent each step.
  if ((marks | now) != marks) layout_->marks.fetch_or(now, std::memory_order_release);
  return stop;
}

absl::Status HealthPage::Attach() {
  const int error = pthread_mutex_trylock(&layout_->life);
  if (error == EOWNERDEAD) {
    // An earlier worker died: this one takes over.
    pthread_mutex_consistent(&layout_->life);
    return absl::OkStatus();
  }
  if (error == 0) return absl::OkStatus();
  return absl::FailedPreconditionError("health page: another live worker is attached to it");
}

HealthPage::Snapshot HealthPage::Read() const {
  Snapshot snapshot;
  for (int tries = 0; tries < kReadTriesMax; ++tries) {
    if (tries >= kReadTriesBeforeYield) ::sched_yield();  // the writer may wait for this core
    const uint64_t before = layout_->sequence.load(std::memory_order_acquire);
    snapshot.generation = layout_->generation.load(std::memory_order_relaxed);
    snapshot.commits = std::max<int64_t>(Get(layout_->commits), 0);
    snapshot.has_step = snapshot.commits > 0;
    snapshot.step = Get(layout_->step);
    snapshot.first_step = Get(layout_->first_step);
    snapshot.first_commit_monotonic_ns = Get(layout_->first_commit_ns);
    snapshot.last_commit_monotonic_ns = Get(layout_->last_commit_ns);
    snapshot.longest_step_us = Microseconds(layout_->longest_step_ns);
    snapshot.phase = phase();
    snapshot.phase_start_monotonic_ns = Get(layout_->phase_start_ns);
    snapshot.step_start_monotonic_ns = Get(layout_->step_start_ns);
    for (size_t i = 0; i < kPhaseCount; ++i) {
      snapshot.phase_total_us[i] = Microseconds(layout_->phase_total_ns[i]);
    }
    snapshot.max_world_size = std::max<int64_t>(Get(layout_->max_world_size), 0);
    snapshot.failed_saves = std::max<int64_t>(Get(layout_->failed_saves), 0);
    snapshot.failed_saves_in_a_row = std::max<int64_t>(Get(layout_->failed_saves_in_a_row), 0);
    if (snapshot.failed_saves > 0) snapshot.save_error = GetText(layout_->save_error);
    std::atomic_thread_fence(std::memory_order_acquire);
    const uint64_t after = layout_->sequence.load(std::memory_order_relaxed);
    if (before == after && before % 2 == 0) break;
  }
  const uint32_t marks = layout_->marks.load(std::memory_order_acquire);
  snapshot.tells_waits = (marks & kTellsWaits) != 0;
  snapshot.stop_aware = (marks & kStopAware) != 0;
  snapshot.stopped_as_asked = (marks & kStoppedAsAsked) != 0;
  snapshot.worker = ReadLife(layout_->life);
  return snapshot;
}

}  // namespace ddp::elastic
