// NCCL over gloo: its rules for tensors, its streams, and its deadlocks; and what Python asks of the device.
//
// An operation publishes itself in the store of its group. Waiting for it first waits until all its members have done so:
// NCCL's kernels run when all ranks have launched them, and gloo alone would buffer a send that nobody receives.
#include "order.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <list>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

namespace cuda_on_host {
namespace {

using at::Tensor;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
using Tensors = std::vector<Tensor>;
using namespace std::chrono_literals;

struct Meeting {  // one operation that several ranks take part in
  std::string key, mine;                              // where it is published, and what
  std::vector<std::pair<int, std::string>> theirs;    // rank of the world, and the key it publishes
  bool is_pair = false;                               // a send and its receive
};

class Communicator;
std::mutex communicators_mutex;
std::vector<Communicator*> communicators;

class Communicator {  // of a group, or of a pair of its ranks
 public:
  const std::string name;
  const std::vector<int> ranks;
  int64_t launched = 0;
  const int64_t stream;  // of its own, as NCCL's

  Communicator(std::string name_, std::vector<int> ranks_, int device) : name(std::move(name_)), ranks(std::move(ranks_)), stream(new_stream(device).id()) {
    std::lock_guard<std::mutex> lock(communicators_mutex);
    communicators.push_back(this);
  }
  ~Communicator() {
    std::lock_guard<std::mutex> lock(communicators_mutex);
    std::erase(communicators, this);
  }
  // How much this rank has launched on each communicator: two ranks that launch the operations of two communicators in
  // different orders have different counts at one of them.
  static std::string counts() {
    std::lock_guard<std::mutex> lock(communicators_mutex);
    std::string text;
    for (const auto* other : communicators) text += c10::str(";", other->name, "=", other->launched);
    return text;
  }
};

std::map<std::string, int64_t> parse_counts(const std::string& text) {
  std::map<std::string, int64_t> counts;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ';');) {
    const auto at = part.rfind('=');
    if (at != std::string::npos) counts[part.substr(0, at)] = std::stoll(part.substr(at + 1));
  }
  return counts;
}

bool has_member(const std::string& communicator, int rank) {  // names end with their ranks: "group 3 [0,1]"
  const auto start = communicator.rfind('[');
  std::stringstream members(communicator.substr(start + 1, communicator.size() - start - 2));
  for (std::string member; std::getline(members, member, ',');) if (std::stoi(member) == rank) return true;
  return false;
}

// What this rank waits for, in the store of the world, for other ranks that look for a circle.
class Waits {
 public:
  Waits(c10::intrusive_ptr<c10d::Store> store, int rank) : store_(std::move(store)), rank_(rank) {}
  ~Waits() { if (told_) try { store_->set(key(rank_), std::string("runs")); } catch (...) {} }

  // Raises where this rank, and all that it waits for, wait for each other: seen twice, nothing can have moved between.
  void look(const std::string& operation, const std::set<int>& missing) {
    std::string text = c10::str("waits ", ++last_, " ", operation, " |");
    for (int rank : missing) text += c10::str(" ", rank);
    if (missing != missing_) store_->set(key(rank_), text), told_ = true, missing_ = missing, before_.clear(), mine_ = text;
    std::map<int, std::string> seen{{rank_, mine_}};
    std::vector<int> next(missing.begin(), missing.end());
    while (!next.empty()) {
      const int rank = next.back();
      next.pop_back();
      if (seen.count(rank)) continue;
      if (!store_->check({key(rank)})) return before_.clear();
      const auto state = store_->get_to_str(key(rank));
      if (state == "runs") return before_.clear();
      seen[rank] = state;
      if (state == "ended") continue;
      std::stringstream others(state.substr(state.rfind('|') + 1));
      for (int other; others >> other;) next.push_back(other);
    }
    if (seen != before_) { before_ = seen; return; }
    std::string story = "deadlock of communicators:";
    for (const auto& [rank, state] : seen) {
      const auto from = state.find(' ', 6);
      story += state == "ended" ? c10::str("\n  rank ", rank, " has ended")
                                : c10::str("\n  rank ", rank, " waits in ", state.substr(from + 1, state.rfind('|') - from - 2), " for rank", state.substr(state.rfind('|') + 1));
    }
    TORCH_CHECK(false, story);
  }
  static std::string key(int rank) { return c10::str("cuda_on_host/", rank); }

 private:
  static inline std::atomic<int64_t> last_{0};
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  bool told_ = false;
  std::string mine_;
  std::set<int> missing_;
  std::map<int, std::string> before_;
};

c10::intrusive_ptr<c10d::Store> without_prefix(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
}

struct Stores {
  c10::intrusive_ptr<c10d::Store> group, waiting, world;  // `waiting` is a connection of its own: a wait blocks others
  int rank;                                               // of the world
};

class Operation final : public c10d::Work {
 public:
  Operation(std::string name, Stores stores, std::vector<Meeting> meetings, Tensors held, Tensors results, std::function<void()> after, Clock end, int device, bool blocks_host)
      : name_(std::move(name)), stores_(std::move(stores)), meetings_(std::move(meetings)), held_(std::move(held)),
        results_(std::move(results)), after_(std::move(after)), end_(std::move(end)), device_(device), blocks_host_(blocks_host) {
    for (const auto& meeting : meetings_) stores_.group->set(meeting.key, meeting.mine);
  }

  // An operation that is not asynchronous starts after all ranks have come: gloo ends the process where sizes differ.
  void begin(const std::function<Works()>& start, bool is_async) {
    if (!is_async) meet_all();
    works_ = start();
  }

  // The current stream waits for the operation. This host does too, since its kernels run at once, but is not counted.
  bool wait(std::chrono::milliseconds) override {
    finish();
    if (blocks_host_) host_waits(end_, "barrier");
    stream_waits(current_stream(device_), end_);
    return true;
  }
  void synchronize() override { wait(0ms); }
  bool isCompleted() override {
    std::vector<std::string> keys;
    for (const auto& meeting : meetings_) for (const auto& [rank, key] : meeting.theirs) keys.push_back(key);
    if (!is_done_ && !keys.empty() && !stores_.group->check(keys)) return false;
    finish();
    return true;
  }
  bool isSuccess() const override { return true; }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(0ms);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(c10::kCUDA, device_)});
    future->markCompleted(c10::IValue(results_));
    return future;
  }

  bool is_done() const { return is_done_; }
  void finish();

 private:
  void meet_all() {
    if (std::exchange(have_met_, true)) return;
    Waits waits(stores_.world, stores_.rank);
    for (const auto& meeting : meetings_) meet(meeting, waits);
  }
  void meet(const Meeting& meeting, Waits& waits) {
    std::vector<std::string> keys;
    for (const auto& [rank, key] : meeting.theirs) keys.push_back(key);
    using Time = std::chrono::steady_clock;
    auto next_look = Time::now() + 500ms;
    for (auto pause = 50us; !keys.empty() && !stores_.waiting->check(keys); pause = std::min<std::chrono::microseconds>(2 * pause, 5ms)) {
      std::this_thread::sleep_for(pause);
      if (Time::now() < next_look) continue;
      std::set<int> missing;
      for (const auto& [rank, key] : meeting.theirs) if (!stores_.waiting->check({key})) missing.insert(rank);
      if (!missing.empty()) waits.look(name_, missing);
      next_look = Time::now() + 500ms;
    }
    if (keys.empty()) return;
    const auto theirs = stores_.waiting->get_to_str(keys[0]);
    const auto rank = meeting.theirs[0].first;
    const auto what = [](const std::string& text) { return text.substr(0, text.find(';')); };
    auto expected = what(meeting.mine);
    if (meeting.is_pair) expected = expected.starts_with("send") ? "recv" + expected.substr(4) : "send" + expected.substr(4);
    TORCH_CHECK(expected == what(theirs), "NCCL would hang or mix up data: in ", name_, " rank ", stores_.rank, " does ", what(meeting.mine), ", and rank ", rank, " does ", what(theirs));
    const auto mine = parse_counts(meeting.mine), others = parse_counts(theirs);
    for (const auto& [communicator, count] : mine) {
      if (!has_member(communicator, rank) || !others.count(communicator) || others.at(communicator) == count) continue;
      TORCH_CHECK(false, "NCCL may deadlock: before ", name_, " rank ", stores_.rank, " has launched ", count, " operations of ", communicator, ", and rank ", rank, " has launched ",
                  others.at(communicator), ": all ranks must launch the operations of two communicators in one order");
    }
  }

  const std::string name_;
  const Stores stores_;
  const std::vector<Meeting> meetings_;
  Works works_;
  Tensors held_, results_;
  const std::function<void()> after_;
  const Clock end_;
  const int device_;
  const bool blocks_host_;
  bool have_met_ = false;
  std::mutex finishing_;
  std::atomic<bool> is_done_{false};
};

std::mutex open_mutex;
std::list<c10::intrusive_ptr<Operation>> open_operations;  // kept until they end, as NCCL's watchdog does

void Operation::finish() {
  std::lock_guard<std::mutex> lock(finishing_);
  if (is_done_) return;
  meet_all();
  for (auto& work : works_) work->wait();
  // A thread of gloo's holds the tensors for a moment more, or for long on a busy machine.
  for (auto& work : works_) for (int i = 0; i < 10000 && work.use_count() > 1; i++) std::this_thread::sleep_for(100us);
  works_.clear();
  if (after_) after_();
  is_done_ = true;
  held_.clear();
  std::lock_guard<std::mutex> open(open_mutex);  // results belong to who waits for them, and to nobody else
  std::erase_if(open_operations, [this](const auto& operation) { return operation.get() == this; });
}

using W = c10::intrusive_ptr<c10d::Work>;

class HostNCCL final : public c10d::Backend {
 public:
  HostNCCL(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::string name, std::vector<int> ranks)
      : Backend(rank, size), gloo_(std::move(gloo)), ranks_(std::move(ranks)), name_(std::move(name)) {
    stores_ = {store, store->clone(), without_prefix(store), ranks_.at(rank)};
    whole_ = std::make_unique<Communicator>(title(name_, ranks_), ranks_, current_device());
  }
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void eagerConnectSingleDevice(at::Device) override { is_eager = true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return whole_->launched; }
  bool is_eager = false;

  void startCoalescing() override {
    TORCH_CHECK(!group_, "startCoalescing inside of another");
    group_.emplace();
  }
  W endCoalescing() override {  // one launch, as between ncclGroupStart and ncclGroupEnd: no order among its sends and receives
    TORCH_CHECK(group_, "endCoalescing without startCoalescing");
    auto group = std::move(*group_);
    group_.reset();
    if (group.works.empty()) return {};
    if (group.collectives) group.meetings.push_back(meet_all(c10::str("a group of ", group.collectives)));
    return launch(c10::str("a group of ", group.works.size(), " on ", whole_->name), *whole_, std::move(group.meetings), [&] { return group.works; }, group.in, group.out, [after = group.after] {
      for (const auto& f : after) if (f) f();
    }, true);
  }

  W broadcast(Tensors& t, const c10d::BroadcastOptions& o) override { return all(c10::str("broadcast from ", o.rootRank), [&] { return gloo_->broadcast(*hosts(t), o); }, t, t, o.asyncOp); }
  W allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    auto p = o;
    auto after = mean(p.reduceOp, t);
    return all("all_reduce", [&] { return gloo_->allreduce(*hosts(t), p); }, t, t, o.asyncOp, after);
  }
  W allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    c10d::AllreduceOptions each;
    each.reduceOp = o.reduceOp;
    auto after = mean(each.reduceOp, t);
    auto start = [&] {
      Works works;
      for (auto& one : t) {
        Tensors alone{checked(one)};
        works.push_back(gloo_->allreduce(alone, each));
      }
      return works;
    };
    return all("all_reduce", start, t, t, o.asyncOp, after);
  }
  W reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    auto p = o;
    auto after = mean(p.reduceOp, t);
    return all(c10::str("reduce to ", o.rootRank), [&] { return gloo_->reduce(*hosts(t), p); }, t, t, o.asyncOp, after);
  }
  W allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override { return all("all_gather", [&] { return gloo_->allgather(*host_lists(out), *hosts(in), o); }, in, out.at(0), o.asyncOp); }
  W _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto a = checked(out), b = checked(in);
    return all("all_gather", [&] { return gloo_->_allgather_base(a, b, o); }, {in}, {out}, o.asyncOp);
  }
  W allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override { return all("all_gather", [&] { return gloo_->allgather_into_tensor_coalesced(*hosts(out), *hosts(in), o); }, in, out, o.asyncOp); }
  W reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    auto p = o;
    auto after = mean(p.reduceOp, out);
    return all("reduce_scatter", [&] { return gloo_->reduce_scatter(*hosts(out), *host_lists(in), p); }, in.at(0), out, o.asyncOp, after);
  }
  W _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto p = o;
    auto a = checked(out), b = checked(in);
    auto after = mean(p.reduceOp, {out});
    return all("reduce_scatter", [&] { return gloo_->_reduce_scatter_base(a, b, p); }, {in}, {out}, o.asyncOp, after);
  }
  W reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    auto p = o;
    auto after = mean(p.reduceOp, out);
    return all("reduce_scatter", [&] { return gloo_->reduce_scatter_tensor_coalesced(*hosts(out), *hosts(in), p); }, in, out, o.asyncOp, after);
  }
  W gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override { return all(c10::str("gather to ", o.rootRank), [&] { return gloo_->gather(*host_lists(out), *hosts(in), o); }, in, out.empty() ? Tensors{} : out[0], o.asyncOp); }
  W scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override { return all(c10::str("scatter from ", o.rootRank), [&] { return gloo_->scatter(*hosts(out), *host_lists(in), o); }, in.empty() ? Tensors{} : in[0], out, o.asyncOp); }
  W alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is, const c10d::AllToAllOptions& o) override {
    auto a = checked(out), b = checked(in);
    return all("all_to_all", [&] { return gloo_->alltoall_base(a, b, os, is, o); }, {in}, {out}, o.asyncOp);
  }
  W alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override { return all("all_to_all", [&] { return gloo_->alltoall(*hosts(out), *hosts(in), o); }, in, out, o.asyncOp); }
  W barrier(const c10d::BarrierOptions&) override { return all("barrier", [&] { return gloo_->barrier({}); }, {}, {}, false, {}, true); }
  W send(Tensors& t, int to, int tag) override { return pair("send", t, to, [&] { return gloo_->send(*hosts(t), to, tag); }, true); }
  W recv(Tensors& t, int from, int tag) override { return pair("recv", t, from, [&] { return gloo_->recv(*hosts(t), from, tag); }, false); }

  void split() {  // a collective of the parent, as ncclCommSplit, of members and others alike
    py::gil_scoped_release no_gil;
    all("split", [&] { return gloo_->barrier({}); }, {}, {}, false)->wait();
  }

 private:
  struct Group {
    std::vector<Meeting> meetings;
    Works works;
    Tensors in, out;
    std::vector<std::function<void()>> after;
    int collectives = 0;
  };

  static std::string title(const std::string& name, const std::vector<int>& ranks) { return c10::str("group ", name, " [", c10::Join(",", ranks), "]"); }

  Tensor checked(const Tensor& t) {
    TORCH_CHECK(t.is_cuda(), "NCCL: tensors must be on a CUDA device, and one is on ", t.device());
    TORCH_CHECK(!t.is_sparse() && t.is_non_overlapping_and_dense(), "NCCL: tensors must be contiguous");
    TORCH_CHECK(t.device().index() == current_device(), "NCCL: a tensor on ", t.device(), ", and this rank's device is ", current_device());
    TORCH_CHECK(t.scalar_type() != at::kShort && !at::isComplexType(t.scalar_type()), "NCCL: no type for ", t.scalar_type());
    return host(t);
  }
  // gloo takes lists by reference and keeps none of them.
  std::unique_ptr<Tensors> hosts(const Tensors& tensors) {
    auto made = std::make_unique<Tensors>();
    for (const auto& t : tensors) made->push_back(checked(t));
    return made;
  }
  std::unique_ptr<std::vector<Tensors>> host_lists(const std::vector<Tensors>& lists) {
    auto made = std::make_unique<std::vector<Tensors>>();
    for (const auto& list : lists) made->push_back(*hosts(list));
    return made;
  }
  std::function<void()> mean(c10d::ReduceOp& op, Tensors outs) {  // which gloo has not
    if (op.op_ != c10d::ReduceOp::AVG) return {};
    op = c10d::ReduceOp::SUM;
    return [outs = *hosts(outs), size = size_] { for (auto t : outs) t.div_(size); };
  }

  static std::string shape(const Tensors& in) {
    int64_t count = 0;
    for (const auto& t : in) count += t.numel();
    return in.empty() ? "" : c10::str(" of ", count, " ", in[0].scalar_type());
  }

  Meeting meet_all(const std::string& what) {
    const auto number = ++whole_->launched;
    Meeting meeting{c10::str("meet/", number, "/", rank_), what + Communicator::counts(), {}, false};
    for (int i = 1; i < size_; i++) {
      const int other = (rank_ + i) % size_;
      meeting.theirs.emplace_back(ranks_[other], c10::str("meet/", number, "/", other));
    }
    return meeting;
  }

  template <class Start>
  static Works started(const Start& start) {
    if constexpr (std::is_same_v<decltype(start()), Works>) return start();
    else return {start()};
  }

  template <class Start>
  W all(const std::string& what, const Start& start, Tensors in, Tensors out, bool async, std::function<void()> after = {}, bool blocks_host = false) {
    for (const auto& t : in) checked(t);
    for (const auto& t : out) checked(t);
    if (group_) {
      auto works = started(start);
      group_->collectives += works.size();
      return join_group(std::move(works), in, out, after);
    }
    // Sizes are compared where all ranks must give the same.
    const bool is_equal = what == "all_reduce" || what.starts_with("broadcast") || what.starts_with("reduce to");
    auto meeting = meet_all(what + (is_equal ? shape(in) : ""));
    return launch(c10::str(what, " number ", whole_->launched, " of ", whole_->name), *whole_, {meeting}, [&] { return started(start); }, in, out, std::move(after), async, blocks_host);
  }
  template <class Start>
  W pair(const std::string& what, Tensors t, int peer, const Start& start, bool is_send) {
    const auto in = is_send ? t : Tensors{}, out = is_send ? Tensors{} : t;
    const auto first = std::min(rank_, peer), second = std::max(rank_, peer);
    if (group_) {  // on the communicator of the whole group
      const auto way = is_send ? c10::str(rank_, ">", peer) : c10::str(peer, ">", rank_);
      const auto key = c10::str("batch/", way, "/", ++batched_[way]);
      group_->meetings.push_back({key + (is_send ? "/s" : "/r"), what + shape(t), {{ranks_[peer], key + (is_send ? "/r" : "/s")}}, true});
      return join_group({start()}, in, out, {});
    }
    auto& communicator = pairs_[peer];
    if (!communicator) communicator = std::make_unique<Communicator>(title(c10::str(name_, " pair"), {ranks_[first], ranks_[second]}), std::vector<int>{ranks_[first], ranks_[second]}, current_device());
    const auto key = c10::str("pair/", first, ":", second, "/", ++communicator->launched, "/");
    Meeting meeting{c10::str(key, rank_), what + shape(t) + Communicator::counts(), {{ranks_[peer], c10::str(key, peer)}}, true};
    return launch(c10::str(what, " number ", communicator->launched, " of ", communicator->name), *communicator, {meeting}, [&] { return Works{start()}; }, in, out, {}, true);
  }
  W join_group(Works works, const Tensors& in, const Tensors& out, std::function<void()> after) {
    for (auto& work : works) group_->works.push_back(work);
    group_->in.insert(group_->in.end(), in.begin(), in.end());
    group_->out.insert(group_->out.end(), out.begin(), out.end());
    group_->after.push_back(std::move(after));
    return {};
  }

  W launch(const std::string& name, Communicator& communicator, std::vector<Meeting> meetings, const std::function<Works()>& start, const Tensors& in, const Tensors& out, std::function<void()> after, bool async, bool blocks_host = false) {
    const int device = current_device();
    make_context(device);
    const auto current = current_stream(device);
    const c10::Stream stream = async ? c10::Stream(c10::Stream::UNSAFE, current.device(), communicator.stream) : current;
    stream_waits(stream, seen_by(current));
    const auto now = step(stream, name);
    for (const auto& t : in) use(t, false, now, name);
    for (const auto& t : out) use(t, true, now, name);
    for (const auto& t : in) suffer(device, "communication", t);
    Tensors held = in;
    held.insert(held.end(), out.begin(), out.end());
    auto made = c10::make_intrusive<Operation>(name, stores_, std::move(meetings), held, out, std::move(after), seen_by(stream), device, blocks_host);
    made->begin(start, async);
    std::lock_guard<std::mutex> lock(open_mutex);
    if (!made->is_done()) open_operations.push_back(made);
    return made;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::vector<int> ranks_;  // of the world
  const std::string name_;
  Stores stores_;
  std::unique_ptr<Communicator> whole_;
  std::map<int, std::unique_ptr<Communicator>> pairs_;
  std::map<std::string, int64_t> batched_;
  std::optional<Group> group_;
};

void finish_communication() {
  decltype(open_operations) operations;
  {
    std::lock_guard<std::mutex> lock(open_mutex);
    operations = open_operations;
  }
  for (auto& operation : operations) operation->finish();
}

struct Timer final : c10d::Timer {  // of DistributedDataParallel
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 0; }
};

}  // namespace
}  // namespace cuda_on_host

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, cuda_on_host::Timer);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace cuda_on_host;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  before_device_wait(&finish_communication);
  m.def("devices", &devices);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("make_context", &make_context);
  m.def("contexts", &contexts);
  m.def("current_stream", [](int device) { return current_stream(device).id(); });
  m.def("set_stream", &set_stream);
  m.def("device_waits", &device_waits, no_gil);
  m.def("waits", &waits);
  m.def("forbid_waits", &forbid_waits);
  m.def("allocated", &allocated);
  m.def("peak", &peak);
  m.def("reset_peak", &reset_peak);
  m.def("set_memory", &set_memory, py::arg("device"), py::arg("bytes"));
  m.def("memory", &memory);
  m.def("plant", &plant, py::arg("device"), py::arg("operation"), py::arg("seconds_per_byte") = 0, py::arg("is_wrong") = false);
  m.def("pinned_bytes", &pinned_bytes);
  m.def("resize_storage", &resize_storage);
  m.def("default_generator", [](int device) { return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(device))); });
  m.def("rank_ended", [](const c10::intrusive_ptr<c10d::Store>& store, int rank) { without_prefix(store)->set(Waits::key(rank), std::string("ended")); });
  py::class_<HostNCCL, c10::intrusive_ptr<HostNCCL>, c10d::Backend>(m, "HostNCCL")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, c10::intrusive_ptr<c10d::Backend>, int, int, std::string, std::vector<int>>())
      .def("perform_nocolor_split", [](HostNCCL& self, at::Device) { self.split(); })
      .def("split", &HostNCCL::split)
      .def("eager_connect_single_device", &HostNCCL::eagerConnectSingleDevice)
      .def_readonly("is_eager", &HostNCCL::is_eager);
}
