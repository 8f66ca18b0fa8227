#ifndef DDP_TESTING_STORY_REPLAY_H_
#define DDP_TESTING_STORY_REPLAY_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ddp::testing {

// Plays the events of one story on the code under test. Each test implements it for its own code.
class StoryPlayer {
 public:
  using Words = std::vector<std::string>;

  virtual ~StoryPlayer() = default;

  // Applies the line "options nproc=2 ...", split into words. Called at most once, before the first
  // event.
  virtual void SetOptions(const Words& words) = 0;

  // Plays one event, split into words, without its "> ". Returns its results, one per line.
  virtual std::vector<std::string> Play(const Words& words) = 0;
};

// Stories are text files; each is a test case. A line that begins with `#` is a comment, `options`
// sets up the code under test, and `> ...` is an event. The lines below an event are its expected
// results:
//
//   > exit 1 signal 9
//   send SIGTERM to local ranks 0
//
// With --rewrite as an argument, the program writes the present results into the files, to be
// reviewed as a difference. `bazel run` finds the files among the sources.
struct StorySuite {
  std::string name;    // of the test suite: "AgentCoreTest"
  std::string folder;  // of the stories (*.txt), from the root of the sources
  std::string target;  // for the message about --rewrite: "//elastic/agent:agent_core_test"
  std::function<std::unique_ptr<StoryPlayer>()> make_player;  // makes one for each story
};

// Registers a test case for each story and runs all tests of the program. Call it in main() and
// return its result.
int RunStories(int argc, char** argv, const StorySuite& suite);

}  // namespace ddp::testing

#endif  // DDP_TESTING_STORY_REPLAY_H_
