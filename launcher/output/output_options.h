#ifndef DDP_LAUNCHER_OUTPUT_OUTPUT_OPTIONS_H_
#define DDP_LAUNCHER_OUTPUT_OUTPUT_OPTIONS_H_

#include <map>
#include <set>
#include <string>
#include <vector>

namespace ddp::launcher {

// Output streams of a worker. Bits, as in the value of -r and -t.
enum Streams : int { kNoStream = 0, kStdout = 1, kStderr = 2, kBothStreams = 3 };

// Streams by local rank: the value of -r or -t.
struct StreamMap {
  int all = kNoStream;  // streams of ranks that `by_local_rank` does not name
  std::map<int, int> by_local_rank;

  int Get(int local_rank) const;
  bool Contains(Streams stream) const;  // true when any rank has one of these bits
  bool empty() const { return !Contains(kBothStreams); }
};

// Destinations of the workers' output.
struct OutputOptions {
  std::string log_dir;  // folder of the log files; empty: a temporary one
  StreamMap redirects;
  StreamMap tee;
  std::set<int> local_ranks_filter;  // local ranks whose output reaches the console; empty: all
  std::vector<std::string> filters_of_stdout;  // texts; a teed line that contains one is duplicated
  std::vector<std::string> filters_of_stderr;
  std::string prefix_template;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_OUTPUT_OPTIONS_H_
