// c10d backend "zlink": exact collectives between processes of one machine, over a link that is a model.
//
// Data.  A rank reads its peers' buffers with process_vm_readv: one copy, no sockets, little processor time.
// Time.  A link has a rate (bytes a second) and a latency (for each step of a ring). A collective ends at
//
//     max(its last issue over the ranks, when the link is free) + latency * steps + wire bytes / rate
//
// Wire bytes are those that each rank sends in a ring, while it receives as many: the link is full duplex.
// One link.  All groups over the same processes share one link. Whoever is the last to issue a collective reserves the
// link for it, in shared memory: collectives of all groups queue in the order in which they became ready, and all ranks
// see the same end. Groups have nothing else in common, each has slots and a thread of its own: none can block another.
// Waiting.  Threads sleep in futex and clock_nanosleep: a collective on its way costs no more than its copy.
//
// Limits: one machine, as many ranks as `kMaxRanks`, ptrace rights, no gather, scatter, reduce or receive from anyone.
// Groups over different processes have links of their own. So has each direction of send and receive, whose tags are
// ignored: the n-th send to a peer is its n-th receive.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <fcntl.h>
#include <linux/futex.h>
#include <pybind11/chrono.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using at::Tensor;
using c10::intrusive_ptr;
using namespace c10d;
using i64 = int64_t;
using u32 = uint32_t;
using Tensors = std::vector<Tensor>;

constexpr int kMaxRanks = 8;
constexpr int kSlots = 256;  // collectives of a group that may be in flight
constexpr i64 kSecond = 1'000'000'000;
constexpr i64 kScratchBytes = 1 << 18;  // a reduction goes through pieces that stay in the cache

using Addresses = std::array<i64, kMaxRanks>;  // by rank

// -- shared memory ----------------------------------------------------------------------------------------------------

// What a rank says of a collective that it issued: when, where its buffer is, and where in it each peer's part begins.
struct Announcement {
  i64 issued, address, offsets[kMaxRanks];
};

// One collective of a group. The counters only grow: in its n-th use (from 0) a slot's `arrived` goes from n to n + 1 times
// the number of ranks.
struct Slot {
  std::atomic<u32> arrived;  // ranks that have issued it
  std::atomic<u32> ready;    // 1 a use: all have arrived, and `end` is known
  std::atomic<u32> reduced;  // ranks whose part is reduced: the others may read it
  std::atomic<u32> done;     // ranks that read no more of anyone's buffer
  std::atomic<i64> end;      // when the link has carried it (CLOCK_MONOTONIC, ns); 0 on an unlimited link
  Announcement ranks[kMaxRanks];
};

// Of one group. `home` says which group's `link_free` is the clock of their common link.
struct Segment {
  std::atomic<i64> processes[kMaxRanks];
  std::atomic<u32> joined, settled;
  std::atomic<i64> link_free;
  char home[64];
  Slot collectives[kSlots];
  Slot messages[kMaxRanks][kMaxRanks][kSlots];  // [source][destination]
};

i64 now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

void sleep_until(i64 time) {
  timespec t{time / kSecond, time % kSecond};
  while (now() < time && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr)) {
  }
}

void futex(std::atomic<u32>& word, int operation, u32 value, timespec* limit) {
  syscall(SYS_futex, reinterpret_cast<u32*>(&word), operation, value, limit, nullptr, 0);
}

void bump(std::atomic<u32>& counter) {
  counter.fetch_add(1);
  futex(counter, FUTEX_WAKE, 1 << 20, nullptr);
}

// Sleep until `counter` has reached `value` (it may wrap around); raise after `limit` nanoseconds.
void await(std::atomic<u32>& counter, u32 value, i64 limit) {
  const i64 begin = now();
  for (u32 seen = counter; static_cast<int32_t>(seen - value) < 0; seen = counter) {
    timespec second{1, 0};
    futex(counter, FUTEX_WAIT, seen, &second);
    TORCH_CHECK(now() - begin < limit, "zlink: timeout while waiting for a peer");
  }
}

// Copy from the memory of another process.
void pull(i64 process, void* to, i64 from, size_t bytes) {
  for (char* at = static_cast<char*>(to); bytes;) {
    iovec local{at, bytes}, remote{reinterpret_cast<void*>(from), bytes};
    const ssize_t n = process_vm_readv(process, &local, 1, &remote, 1, 0);
    TORCH_CHECK(n > 0, "zlink: process_vm_readv: ", strerror(errno));
    at += n, from += n, bytes -= n;
  }
}

std::shared_ptr<Segment> map_segment(int fd) {
  void* at = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TORCH_CHECK(at != MAP_FAILED, "zlink: mmap: ", strerror(errno));
  return {static_cast<Segment*>(at), [](Segment* s) { munmap(s, sizeof(Segment)); }};
}

// The segments whose clock is a link's. They stay for the life of this process: a later group over the same processes shares
// the link even if the first is gone. Each group's rank 0 decides by its own table, so the others need not have joined
// their groups in the same order.
struct Homes {
  std::mutex mutex;
  std::map<std::vector<i64>, std::string> by_processes;  // (sorted)
  std::map<std::string, std::shared_ptr<Segment>> segments;

  static Homes& get() {
    static auto* homes = new Homes;
    return *homes;
  }
};

// -- works ------------------------------------------------------------------------------------------------------------

intrusive_ptr<c10::ivalue::Future> tensors_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

class LinkWork : public Work {
 public:
  LinkWork(int rank, OpType type, Tensors outputs)
      : Work(rank, type), outputs_(std::move(outputs)), future_(tensors_future()) {}

  void end(std::exception_ptr error) {
    finish(error);
    auto completed = [future = future_, outputs = outputs_, error] {
      if (error) {
        future->setError(error);
      } else {
        future->markCompleted(c10::IValue(outputs));
      }
    };
    // What is done then may wait for another collective (PowerSGD's hook of DDP does), which this thread would have to run.
    if (std::getenv("ZLINK_CALLBACKS_APART") != nullptr) {
      std::thread(completed).detach();
    } else {
      completed();
    }
  }

  bool wait(std::chrono::milliseconds) override {
    std::unique_lock<std::mutex> lock(mutex_);
    cv_.wait(lock, [&] { return completed_; });
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  Tensors result() override { return outputs_; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors outputs_;
  intrusive_ptr<c10::ivalue::Future> future_;
};

// Several collectives that were issued together.
class Together : public Work {
 public:
  explicit Together(std::vector<intrusive_ptr<LinkWork>> works) : works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isCompleted(); });
  }

  bool wait(std::chrono::milliseconds limit) override {
    for (auto& work : works_) work->wait(limit);
    return true;
  }

  intrusive_ptr<c10::ivalue::Future> getFuture() override { return works_.back()->getFuture(); }

 private:
  std::vector<intrusive_ptr<LinkWork>> works_;
};

// A thread that runs what it is given in order: what a communication stream is on a GPU.
class Queue {
 public:
  Queue() : thread_([this] { run(); }) {}

  ~Queue() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void push(intrusive_ptr<LinkWork> work, std::function<void()> task) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      waiting_.emplace_back(std::move(work), std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    prctl(PR_SET_TIMERSLACK, 1000UL);
    prctl(PR_SET_NAME, "zlink");
    at::NoGradGuard no_grad;
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      auto [work, task] = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        task();
      } catch (...) {
        error = std::current_exception();
      }
      task = nullptr;  // (lets go of the tensors before anyone hears that it is done)
      work->end(error);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<intrusive_ptr<LinkWork>, std::function<void()>>> waiting_;
  bool stop_ = false;
  std::thread thread_;
};

// -- the backend ------------------------------------------------------------------------------------------------------

char* bytes_of(const Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

Tensor view_of(void* at, i64 elements, const Tensor& like) {
  return at::from_blob(at, {elements}, at::TensorOptions().dtype(like.scalar_type()));
}

void combine(Tensor into, const Tensor& other, ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::AVG:
      into.add_(other);
      break;
    case ReduceOp::PRODUCT:
      into.mul_(other);
      break;
    case ReduceOp::MAX:
      at::maximum_out(into, into, other);
      break;
    case ReduceOp::MIN:
      at::minimum_out(into, into, other);
      break;
    default:
      TORCH_CHECK(false, "zlink: this reduction is not supported");
  }
}

class Link : public Backend {
 public:
  Link(intrusive_ptr<Store> store, int rank, int size, std::chrono::milliseconds timeout, double gbps, double latency_us)
      : Backend(rank, size), ranks_(size), rank_(rank), limit_(timeout.count() * 1'000'000) {
    TORCH_CHECK(size <= kMaxRanks, "zlink: at most ", kMaxRanks, " ranks");
    set_link(gbps, latency_us);
    join(*store);
    scratch_ = at::empty({kScratchBytes}, at::kByte);
    queue_ = std::make_unique<Queue>();
  }

  ~Link() override {
    queue_.reset();
    message_queues_.clear();
  }

  const std::string getBackendName() const override { return "zlink"; }
  void setTimeout(std::chrono::milliseconds) override {}
  bool supportsCoalescing() const override { return false; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }

  // A rate of 0 is an unlimited link, without latency.
  void set_link(double gbps, double latency_us) {
    rate_ = gbps * 1e9 / 8;
    latency_ = latency_us * 1e3;
  }

  std::vector<double> stats(bool reset) {
    std::lock_guard<std::mutex> guard(stats_mutex_);
    std::vector<double> found{static_cast<double>(stats_.ops), stats_.bytes, stats_.link, stats_.copy};
    if (reset) stats_ = {};
    return found;
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    TORCH_CHECK(tensors.size() == 1);
    return all_reduce(tensors[0], options.reduceOp, ring_steps());
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    return together(tensors.size(), [&](size_t i, int steps) { return all_reduce(tensors[i], options.reduceOp, steps); });
  }

  intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions&) override {
    return all_gather({output}, {input});
  }

  intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const AllgatherOptions&) override {
    return all_gather(outputs, inputs);
  }

  intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions&) override {
    TORCH_CHECK(outputs.size() == 1 && outputs[0].size() == ranks_);
    Tensors parts = outputs[0];
    Tensor input = inputs[0].contiguous();
    const i64 bytes = input.nbytes();
    auto body = [=, this](Slot& slot, u32) {
      for (u32 r = 0; r < ranks_; r++) {
        Tensor part = parts[r].is_contiguous() ? parts[r] : at::empty_like(input);
        if (r == rank_) {
          part.copy_(input.view_as(part));
        } else {
          pull(process(r), part.data_ptr(), slot.ranks[r].address, bytes);
        }
        if (!part.is_same(parts[r])) Tensor(parts[r]).copy_(part);
      }
      return false;
    };
    return issue(OpType::ALLGATHER, parts, {input}, input.data_ptr(), bytes * (ranks_ - 1.0), ring_steps(), body);
  }

  intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const ReduceScatterOptions& options) override {
    return reduce_scatter_tensors({output}, {input}, options.reduceOp);
  }

  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) override {
    return reduce_scatter_tensors(outputs, inputs, options.reduceOp);
  }

  intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const ReduceScatterOptions& options) override {
    Tensors flat;
    for (auto& input : inputs[0]) flat.push_back(input.reshape({-1}));
    return reduce_scatter_tensors({outputs[0]}, {at::cat(flat)}, options.reduceOp);
  }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    Tensor tensor = tensors[0], whole = tensor.contiguous();
    const u32 root = options.rootRank;
    const i64 bytes = whole.nbytes();
    auto body = [=, this](Slot& slot, u32) {
      if (rank_ != root) {
        pull(process(root), whole.data_ptr(), slot.ranks[root].address, bytes);
        if (!tensor.is_same(whole)) Tensor(tensor).copy_(whole);
      }
      return false;
    };
    return issue(OpType::BROADCAST, {tensor}, {tensor, whole}, whole.data_ptr(), bytes, 1, body);
  }

  intrusive_ptr<Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<i64>& output_rows, std::vector<i64>& input_rows,
      const AllToAllOptions&) override {
    TORCH_CHECK(output.is_contiguous(), "zlink: the output must be contiguous");
    Tensor from = input.contiguous(), to = output;
    auto row_bytes = [](const Tensor& t) -> i64 {
      return t.dim() && t.size(0) ? t.nbytes() / t.size(0) : t.element_size();
    };
    std::vector<i64> from_offset(ranks_), to_offset(ranks_), to_bytes(ranks_);
    i64 read = 0, written = 0, sent = 0, received = 0;
    for (u32 r = 0; r < ranks_; r++) {
      const i64 mine = (input_rows.empty() ? from.size(0) / ranks_ : input_rows[r]) * row_bytes(from);
      to_bytes[r] = (output_rows.empty() ? to.size(0) / ranks_ : output_rows[r]) * row_bytes(to);
      from_offset[r] = read;
      to_offset[r] = written;
      read += mine;
      written += to_bytes[r];
      if (r != rank_) sent += mine, received += to_bytes[r];
    }
    auto body = [=, this](Slot& slot, u32) {
      for (u32 q = 0; q < ranks_; q++) {
        const u32 r = (rank_ + q) % ranks_;
        char* at = bytes_of(to) + to_offset[r];
        if (!to_bytes[r]) continue;
        if (r == rank_) {
          memcpy(at, bytes_of(from) + from_offset[r], to_bytes[r]);
        } else {
          pull(process(r), at, slot.ranks[r].address + slot.ranks[r].offsets[rank_], to_bytes[r]);
        }
      }
      return false;
    };
    const double wire = std::max(sent, received);
    return issue(OpType::ALLTOALL_BASE, {to}, {to, from}, from.data_ptr(), wire, ring_steps(), body, from_offset);
  }

  intrusive_ptr<Work> barrier(const BarrierOptions&) override {
    return issue(OpType::BARRIER, {}, {}, nullptr, 0, 1, [](Slot&, u32) { return false; });
  }

  intrusive_ptr<Work> send(Tensors& tensors, int to, int) override { return message(tensors[0], to, true); }
  intrusive_ptr<Work> recv(Tensors& tensors, int from, int) override { return message(tensors[0], from, false); }

 private:
  // Does the data's part of a collective on the queue's thread, once every rank has issued it, in the slot's n-th use.
  // Returns true if it has counted this rank in `reduced`.
  using Body = std::function<bool(Slot&, u32)>;

  struct Stats {
    i64 ops = 0;
    double bytes = 0, link = 0, copy = 0;  // (the latter two in seconds)
  };

  i64 process(u32 rank) const { return segment_->processes[rank]; }
  int ring_steps() const { return ranks_ - 1; }

  // Rank 0 makes the group's shared memory, the others open it through rank 0's file descriptor: nothing is left behind.
  void join(Store& store) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    std::string path, name;
    int fd;
    if (rank_ == 0) {
      fd = memfd_create("zlink", MFD_CLOEXEC);
      TORCH_CHECK(fd >= 0 && !ftruncate(fd, sizeof(Segment)), "zlink: memfd_create: ", strerror(errno));
      path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd);
      name = path + "@" + std::to_string(now());  // (descriptors are used again, names are not)
      store.set("zlink", std::vector<uint8_t>(name.begin(), name.end()));
    } else {
      const auto told = store.get("zlink");
      name.assign(told.begin(), told.end());
      path = name.substr(0, name.find('@'));
      fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
      TORCH_CHECK(fd >= 0, "zlink: ", path, ": ", strerror(errno));
    }
    segment_ = map_segment(fd);
    segment_->processes[rank_] = getpid();
    Homes& homes = Homes::get();
    {
      std::lock_guard<std::mutex> guard(homes.mutex);
      homes.segments[name] = segment_;
    }
    bump(segment_->joined);
    await(segment_->joined, ranks_, limit_);  // from here on any rank can find this segment by its name
    if (rank_ == 0) {
      std::vector<i64> ends;
      for (u32 r = 0; r < ranks_; r++) ends.push_back(process(r));
      std::sort(ends.begin(), ends.end());
      std::lock_guard<std::mutex> guard(homes.mutex);
      const std::string& home = homes.by_processes.try_emplace(ends, name).first->second;
      TORCH_CHECK(home.size() < sizeof(Segment::home));
      strcpy(segment_->home, home.c_str());
    } else {
      await(segment_->settled, 1, limit_);
    }
    {
      std::lock_guard<std::mutex> guard(homes.mutex);
      home_ = homes.segments.at(segment_->home);
      if (name != segment_->home) homes.segments.erase(name);
    }
    bump(segment_->settled);
    await(segment_->settled, ranks_, limit_);
    close(fd);
  }

  // When the link has carried what takes it `nanoseconds`, if all ranks had issued it at `ready`.
  i64 reserve(i64 ready, i64 nanoseconds) {
    i64 free = home_->link_free, end;
    do {
      end = std::max(free, ready) + nanoseconds;
    } while (!home_->link_free.compare_exchange_weak(free, end));
    return end;
  }

  intrusive_ptr<LinkWork> issue(
      OpType type, Tensors outputs, Tensors keep, const void* address, double wire, int steps, Body body,
      const std::vector<i64>& offsets = {}) {
    std::lock_guard<std::mutex> guard(issue_mutex_);
    const i64 number = issued_++;
    Slot& slot = segment_->collectives[number % kSlots];
    const u32 use = number / kSlots;
    await(slot.done, use * ranks_, limit_);
    Announcement& mine = slot.ranks[rank_];
    mine.address = reinterpret_cast<i64>(address);
    std::copy(offsets.begin(), offsets.end(), mine.offsets);
    mine.issued = now();
    const double rate = rate_;
    const i64 duration = rate > 0 ? static_cast<i64>(latency_ * steps + wire / rate * kSecond) : 0;
    if (slot.arrived.fetch_add(1) + 1 == (use + 1) * ranks_) {
      i64 ready = 0;
      for (u32 r = 0; r < ranks_; r++) ready = std::max(ready, slot.ranks[r].issued);
      slot.end = rate > 0 ? reserve(ready, duration) : 0;
      bump(slot.ready);
    }
    auto work = c10::make_intrusive<LinkWork>(static_cast<int>(rank_), type, std::move(outputs));
    queue_->push(work, [this, &slot, use, body = std::move(body), keep = std::move(keep), wire, duration] {
      await(slot.ready, use + 1, limit_);
      const i64 end = slot.end, begin = now();
      if (!body(slot, use)) bump(slot.reduced);
      const i64 copied = now();
      bump(slot.done);
      await(slot.done, (use + 1) * ranks_, limit_);  // nobody reads this rank's buffer any more
      sleep_until(end);
      std::lock_guard<std::mutex> stats_guard(stats_mutex_);
      stats_.ops++;
      stats_.bytes += wire;
      stats_.link += static_cast<double>(duration) / kSecond;
      stats_.copy += static_cast<double>(copied - begin) / kSecond;
    });
    return work;
  }

  // Latency is paid once.
  template <typename Issue>
  intrusive_ptr<Work> together(size_t n, Issue issue_one) {
    std::vector<intrusive_ptr<LinkWork>> works;
    for (size_t i = 0; i < n; i++) works.push_back(issue_one(i, i ? 0 : ring_steps()));
    return c10::make_intrusive<Together>(std::move(works));
  }

  // All ranks' elements are reduced into `to`, where this rank's own are already; `from` has where each rank's are.
  void reduce_into(char* to, i64 elements, const Addresses& from, const Tensor& like, ReduceOp::RedOpType op) {
    const i64 size = like.element_size(), most = kScratchBytes / size;
    for (i64 begin = 0; begin < elements; begin += most) {
      const i64 n = std::min(most, elements - begin), at = begin * size;
      Tensor into = view_of(to + at, n, like), other = view_of(scratch_.data_ptr(), n, like);
      for (u32 q = 1; q < ranks_; q++) {
        const u32 r = (rank_ + q) % ranks_;
        pull(process(r), scratch_.data_ptr(), from[r] + at, n * size);
        combine(into, other, op);
      }
      if (op == ReduceOp::AVG && at::isFloatingType(like.scalar_type())) into.div_(static_cast<double>(ranks_));
    }
  }

  void all_are_reduced(Slot& slot, u32 use) {
    bump(slot.reduced);
    await(slot.reduced, (use + 1) * ranks_, limit_);
  }

  // Where each rank's inputs of a collective of several tensors are: by tensor, then by rank.
  std::vector<Addresses> addresses_of(const Slot& slot, const std::vector<i64>& mine) const {
    std::vector<Addresses> found(mine.size());
    std::vector<i64> theirs(mine.size());
    for (u32 r = 0; r < ranks_; r++) {
      if (r != rank_) pull(process(r), theirs.data(), slot.ranks[r].address, mine.size() * sizeof(i64));
      for (size_t i = 0; i < mine.size(); i++) found[i][r] = r == rank_ ? mine[i] : theirs[i];
    }
    return found;
  }

  // Several tensors are one collective, as a group call of NCCL is one launch.
  intrusive_ptr<LinkWork> all_gather(const Tensors& outputs, const Tensors& given) {
    Tensors keep = outputs;
    auto from = std::make_shared<std::vector<i64>>();
    std::vector<i64> to, bytes;
    double wire = 0;
    for (size_t i = 0; i < outputs.size(); i++) {
      TORCH_CHECK(outputs[i].is_contiguous(), "zlink: the output must be contiguous");
      Tensor input = given[i].contiguous();
      bytes.push_back(input.nbytes());
      TORCH_CHECK(
          static_cast<i64>(outputs[i].nbytes()) == bytes[i] * ranks_, "zlink: all_gather: the output has another size");
      to.push_back(reinterpret_cast<i64>(outputs[i].data_ptr()));
      from->push_back(reinterpret_cast<i64>(input.data_ptr()));
      wire += bytes[i] * (ranks_ - 1.0);
      keep.push_back(input);
    }
    auto body = [=, this](Slot& slot, u32) {
      const auto sources = addresses_of(slot, *from);
      for (size_t i = 0; i < to.size(); i++) {
        char* at = reinterpret_cast<char*>(to[i]);
        const char* mine = reinterpret_cast<char*>(sources[i][rank_]);
        if (at + rank_ * bytes[i] != mine) memcpy(at + rank_ * bytes[i], mine, bytes[i]);
        for (u32 q = 1; q < ranks_; q++) {
          const u32 r = (rank_ + q) % ranks_;
          pull(process(r), at + r * bytes[i], sources[i][r], bytes[i]);
        }
      }
      return false;
    };
    return issue(OpType::_ALLGATHER_BASE, outputs, std::move(keep), from->data(), wire, ring_steps(), body);
  }

  intrusive_ptr<LinkWork> reduce_scatter_tensors(const Tensors& outputs, const Tensors& given, ReduceOp reduce) {
    Tensors keep = outputs;
    auto from = std::make_shared<std::vector<i64>>();
    double wire = 0;
    bool overwrites_input = false;
    for (size_t i = 0; i < outputs.size(); i++) {
      TORCH_CHECK(outputs[i].is_contiguous(), "zlink: the output must be contiguous");
      Tensor input = given[i].contiguous();
      const i64 bytes = outputs[i].nbytes();
      TORCH_CHECK(
          static_cast<i64>(input.nbytes()) == bytes * ranks_, "zlink: reduce_scatter: the input has another size");
      char *to = bytes_of(outputs[i]), *at = bytes_of(input);
      overwrites_input |= to >= at && to < at + bytes * ranks_ && to != at + rank_ * bytes;
      from->push_back(reinterpret_cast<i64>(at));
      wire += bytes * (ranks_ - 1.0);
      keep.push_back(input);
    }
    auto body = [=, this, op = reduce.op_](Slot& slot, u32 use) {
      auto sources = addresses_of(slot, *from);
      Tensors own;  // the results, where they may not be written while peers read the inputs
      for (size_t i = 0; i < outputs.size(); i++) {
        const i64 elements = outputs[i].numel(), bytes = outputs[i].nbytes();
        for (u32 r = 0; r < ranks_; r++) sources[i][r] += rank_ * bytes;
        char* to = bytes_of(outputs[i]);
        if (overwrites_input) {
          own.push_back(at::empty({elements}, outputs[i].options()));
          to = bytes_of(own[i]);
        }
        const char* mine = reinterpret_cast<char*>(sources[i][rank_]);
        if (to != mine) memcpy(to, mine, bytes);
        reduce_into(to, elements, sources[i], outputs[i], op);
      }
      if (!overwrites_input) return false;
      all_are_reduced(slot, use);
      for (size_t i = 0; i < own.size(); i++) memcpy(bytes_of(outputs[i]), bytes_of(own[i]), outputs[i].nbytes());
      return true;
    };
    return issue(OpType::_REDUCE_SCATTER_BASE, outputs, std::move(keep), from->data(), wire, ring_steps(), body);
  }

  // Each rank reduces its part in place, then reads the other parts.
  intrusive_ptr<LinkWork> all_reduce(Tensor tensor, ReduceOp reduce, int steps) {
    Tensor whole = tensor.contiguous();
    const i64 elements = whole.numel(), size = whole.element_size(), part = (elements + ranks_ - 1) / ranks_;
    char* at = bytes_of(whole);
    const auto op = reduce.op_;
    auto first = [=](u32 rank) { return std::min<i64>(elements, rank * part); };
    auto body = [=, this](Slot& slot, u32 use) {
      const i64 begin = first(rank_), end = first(rank_ + 1);
      Addresses from;
      for (u32 r = 0; r < ranks_; r++) from[r] = slot.ranks[r].address + begin * size;
      if (end > begin) reduce_into(at + begin * size, end - begin, from, whole, op);
      all_are_reduced(slot, use);
      for (u32 q = 1; q < ranks_; q++) {
        const u32 r = (rank_ + q) % ranks_;
        const i64 offset = first(r) * size, bytes = (first(r + 1) - first(r)) * size;
        if (bytes) pull(process(r), at + offset, slot.ranks[r].address + offset, bytes);
      }
      if (!tensor.is_same(whole)) Tensor(tensor).copy_(whole);
      return true;
    };
    const double wire = 2.0 * elements * size * (ranks_ - 1) / ranks_;
    return issue(OpType::ALLREDUCE, {tensor}, {whole, tensor}, at, wire, 2 * steps, body);
  }

  // The receiver reads the sender's buffer when both are there.
  intrusive_ptr<Work> message(Tensor tensor, int peer, bool sends) {
    TORCH_CHECK(tensor.is_contiguous(), "zlink: a message must be contiguous");
    const int key = peer * 2 + sends;
    const i64 number = messages_[key]++;
    const u32 use = number / kSlots, source = sends ? rank_ : peer, destination = sends ? peer : rank_;
    Slot& slot = segment_->messages[source][destination][number % kSlots];
    await(slot.done, use * 2, limit_);
    slot.ranks[sends].address = reinterpret_cast<i64>(tensor.data_ptr());
    slot.ranks[sends].offsets[0] = tensor.nbytes();
    slot.ranks[sends].issued = now();
    bump(slot.arrived);
    auto work =
        c10::make_intrusive<LinkWork>(static_cast<int>(rank_), sends ? OpType::SEND : OpType::RECV, Tensors{tensor});
    auto& queue = message_queues_[key];
    if (!queue) queue = std::make_unique<Queue>();
    i64& link_free = message_link_free_[key];
    const double rate = rate_, latency = latency_;
    queue->push(work, [=, this, &slot, &link_free] {
      await(slot.arrived, (use + 1) * 2, limit_);
      const i64 start = std::max({link_free, slot.ranks[0].issued, slot.ranks[1].issued});
      const i64 bytes = slot.ranks[1].offsets[0];
      if (!sends) {
        TORCH_CHECK(bytes == static_cast<i64>(tensor.nbytes()), "zlink: a message of another size was sent");
        pull(process(source), tensor.data_ptr(), slot.ranks[1].address, bytes);
      }
      bump(slot.done);
      await(slot.done, (use + 1) * 2, limit_);
      if (rate > 0) sleep_until(link_free = start + static_cast<i64>(latency + bytes / rate * kSecond));
    });
    return work;
  }

  const u32 ranks_, rank_;
  const i64 limit_;                          // nanoseconds that a peer is waited for
  std::atomic<double> rate_{0}, latency_{0};  // bytes a second; nanoseconds a step
  std::shared_ptr<Segment> segment_, home_;
  Tensor scratch_;
  std::mutex issue_mutex_;
  i64 issued_ = 0;
  std::unique_ptr<Queue> queue_;
  std::map<int, i64> messages_, message_link_free_;  // by peer and direction, as are their queues
  std::map<int, std::unique_ptr<Queue>> message_queues_;
  std::mutex stats_mutex_;
  Stats stats_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Link, Backend, intrusive_ptr<Link>>(module, "Link")
      .def("set_link", &Link::set_link, "Gbit/s (0: unlimited) and microseconds a ring step, from the next collective on")
      .def("stats", &Link::stats, py::arg("reset") = false, "[collectives, wire bytes, link seconds, copy seconds]");
  module.def(
      "create",
      [](intrusive_ptr<Store> store, int rank, int size, std::chrono::duration<double> timeout, double gbps, double us) {
        const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
        return c10::make_intrusive<Link>(std::move(store), rank, size, limit, gbps, us);
      },
      py::call_guard<py::gil_scoped_release>());
}
