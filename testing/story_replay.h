#ifndef DDP_TESTING_STORY_REPLAY_H_
#define DDP_TESTING_STORY_REPLAY_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ddp::testing {

// What happens in one story: a test's own way to play events over the code under test.
class StoryPlayer {
 public:
  using Words = std::vector<std::string>;

  virtual ~StoryPlayer() = default;

  // The line "options nproc=2 ...", by its words; before the first event, if at all.
  virtual void SetOptions(const Words& words) = 0;

  // One event, without its "> ". Returns what follows from it, line by line.
  virtual std::vector<std::string> Play(const Words& words) = 0;
};

// Stories are text files, one test case each. Lines that begin with `#` are comments, `options`
// sets up what is told about, `> ...` is an event, and what stands below an event is what must
// follow from it:
//
//   > exit 1 signal 9
//   send SIGTERM to local ranks 0
//
// With --rewrite as an argument what follows now is written into the files, to be reviewed as a
// difference; `bazel run` finds them among the sources.
struct StorySuite {
  std::string name;    // of the test suite: "AgentCoreTest"
  std::string folder;  // of the stories (*.txt), from the root of the sources
  std::string target;  // to say how to rewrite them: "//elastic/agent:agent_core_test"
  std::function<std::unique_ptr<StoryPlayer>()> make_player;  // a new one for each story
};

// For main(): registers a test case for each story and runs all tests of the program. Returns what
// main() should.
int RunStories(int argc, char** argv, const StorySuite& suite);

}  // namespace ddp::testing

#endif  // DDP_TESTING_STORY_REPLAY_H_
