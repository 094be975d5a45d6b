/* Makes the doctor's findings of the facts. Knows neither MPI nor the machine. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "tools/doctor/doctor.h"

/* --- Findings ----------------------------------------------------------------------------------*/

/* clang-format off */
static const struct {
  const char *why, *advice;
} texts[] = {
    [DOCTOR_BUSY] = {"times measure the processors, not the network: no host is judged by them",
        "end the other programs, or give ranks cores of their own; then again"},
    [DOCTOR_STOLEN] = {"ranks are stopped at any moment: no host is judged by times",
        "a container's cpu.max, or another instance type; then again"},
    [DOCTOR_SPINNING] = {"ranks that wait keep the processors from those that have work",
        "mpi_yield_when_idle 1, or no more ranks than processors"},
    [DOCTOR_SAME_CPU] = {"they take turns on it while other CPUs are idle",
        "do not bind, or bind every rank to a core of its own"},
    [DOCTOR_DOWN] = {"a subnet that not all hosts have carries no exchange",
        "its cable, or there: ip link set dev INTERFACE up"},
    [DOCTOR_DUPLEX] = {"a link that cannot send while it receives loses packets under load",
        "negotiation at both ends of the cable: ethtool -s INTERFACE autoneg on"},
    [DOCTOR_NEGOTIATED] = {"every exchange waits for the slowest link",
        "its cable and switch port: ethtool INTERFACE there"},
    [DOCTOR_SLOW_HOST] = {"every exchange waits for the slowest host",
        "its link, cable or switch port, or a limit on its rate: ethtool and tc qdisc show there"},
    [DOCTOR_SLOW_PAIR] = {"exchanges that use this way wait for it",
        "the way between these two: links (ethtool on both), switches, cables, routing"},
    [DOCTOR_LATE_HOST] = {"small messages wait for it",
        "its way to the others (switches, routing), power saving or load on it"},
    [DOCTOR_WRONG_INTERFACE] = {"every exchange takes as long as the slower one needs",
        "let MPI use the faster one alone"},
    [DOCTOR_ODD_INTERFACE] = {"its way to the others is another one, and may be a slower one",
        "name the interface, the same on every host; its routes if it is named: ip route there"},
    [DOCTOR_MPI_SLOW] = {"the network carries more than MPI sends over it",
        "what MPI takes: mpirun --mca pml ob1 --mca btl tcp,self,vader; UCX_NET_DEVICES; a VPN"},
    [DOCTOR_FIREWALL] = {"MPI's own ports may be open, but others that programs choose are not",
        "open the ports between the hosts"},
    [DOCTOR_MTU] = {"packets larger than the other side takes are lost silently",
        "ip link set dev INTERFACE mtu MTU there, as on the others"},
    [DOCTOR_LINK_SPEED] = {"something between the hosts, or on them, holds the traffic back",
        "look for errors in ethtool -S, for other traffic, for a slower switch, at MTUs"},
    [DOCTOR_STREAMS_HELP] =
        {"one connection does not fill the network: a limit of each flow, or delay",
        "several between two hosts; measure again, as not every Open MPI gains by btl_tcp_links"},
    [DOCTOR_BRIDGE] = {"a library may take it for a network of all hosts, and wait for ever",
        "--mca btl_tcp_if_exclude lo,NAME; oob_tcp_if_exclude; NCCL_SOCKET_IFNAME=^NAME"},
    [DOCTOR_LOOPBACK_NAME] =
        {"gloo and MPICH look the name up, and others then connect to themselves",
        "its real address in /etc/hosts, or the interface: GLOO_SOCKET_IFNAME, HYDRA_IFACE"},
    [DOCTOR_CLOCK] = {"files, certificates and logs of several hosts contradict each other",
        "chronyc or ntpd there"},
};
/* clang-format on */

/* The kinds that are no times. */
#define SURE                                                                                       \
  (1u << DOCTOR_SAME_CPU | 1u << DOCTOR_DOWN | 1u << DOCTOR_DUPLEX | 1u << DOCTOR_NEGOTIATED |     \
   1u << DOCTOR_MTU | 1u << DOCTOR_BRIDGE | 1u << DOCTOR_LOOPBACK_NAME | 1u << DOCTOR_CLOCK)

__attribute__((format(printf, 4, 5))) static void add(struct doctor_diagnosis *diagnosis,
                                                      enum doctor_kind kind, int host,
                                                      const char *format, ...) {
  va_list arguments;
  if (diagnosis->count == DOCTOR_MAX_FINDINGS) {
    diagnosis->more++;
    return;
  }
  struct doctor_finding *finding = &diagnosis->findings[diagnosis->count++];
  *finding = (struct doctor_finding){.kind = kind,
                                     .host = host,
                                     .why = texts[kind].why,
                                     .advice = texts[kind].advice,
                                     .sure = SURE >> kind & 1};
  va_start(arguments, format);
  vsnprintf(finding->seen, sizeof finding->seen, format, arguments);
  va_end(arguments);
}

/* --- Whether times can be believed -------------------------------------------------------------*/

/* Half a processor is more than a system's own services use. A twentieth of the time that ranks
 * wanted, and more than one period that a container lost, are beyond chance. */
#define OTHERS_CPUS  0.5
#define STOLEN_PART  0.05
#define LOST_PERIODS 2

static bool is_busy(const struct doctor_facts *facts, int host) {
  const struct doctor_host *the = &facts->hosts[host];
  return the->others >= OTHERS_CPUS && the->others + the->ranks > doctor_host_cpus(facts, host);
}

/* Judges the processors. Emulated hosts of one machine are all busy: none is named then. */
static bool judge_load(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int busy = 0, worst = 0;
  for (int h = 0; h < facts->host_count; h++) {
    busy += is_busy(facts, h);
    worst = facts->hosts[h].others > facts->hosts[worst].others ? h : worst;
  }
  if (busy)
    add(diagnosis, DOCTOR_BUSY, busy == 1 ? worst : -1,
        "%s: other programs use %.1f of the %d CPUs that %d rank%s to have%s",
        facts->hosts[worst].name, facts->hosts[worst].others, doctor_host_cpus(facts, worst),
        facts->hosts[worst].ranks, facts->hosts[worst].ranks == 1 ? " is" : "s are",
        busy > 1 ? ", and so on other hosts" : "");
  for (int h = 0; h < facts->host_count; h++)
    if (facts->hosts[h].stolen >= STOLEN_PART || facts->hosts[h].lost_periods >= LOST_PERIODS)
      add(diagnosis, DOCTOR_STOLEN, h,
          "%s: the hypervisor took %.0f %% of the time, and a limit of its container stopped it %d "
          "times",
          facts->hosts[h].name, 100 * facts->hosts[h].stolen, facts->hosts[h].lost_periods);
  return diagnosis->count > 0;
}

/* A scheduler's time slice is a few milliseconds: 4,000 to 9,000 us a hop among twice as many ranks
 * as processors, where 6 us are measured when they yield. Less counts only where the cause is
 * plain. */
#define STARVED_MICROSECONDS 2000.0
#define CROWDED_MICROSECONDS 300.0

static bool judge_waiting(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const struct doctor_host *worst = facts->hosts;
  for (int h = 1; h < facts->host_count; h++)
    worst = facts->hosts[h].local_hop > worst->local_hop ? &facts->hosts[h] : worst;
  const int at = (int)(worst - facts->hosts), cpus = doctor_host_cpus(facts, at);
  const bool off = facts->ranks[0].yields == 0; /* the launcher gives all ranks the same */
  if (worst->local_hop < (off && worst->ranks > cpus ? CROWDED_MICROSECONDS : STARVED_MICROSECONDS))
    return false;
  add(diagnosis, DOCTOR_SPINNING, at,
      "a message that goes round the ranks of a host takes %.0f us a hop; %d ranks on %d CPUs of "
      "%s%s",
      worst->local_hop, worst->ranks, cpus, worst->name, off ? ", mpi_yield_when_idle is off" : "");
  diagnosis->set_yield = off;
  return true;
}

/* Judges ranks that share CPUs although the host has others that they were not given. One finding:
 * the launcher does the same on every host. */
static void judge_binding(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  for (int r = 0; r < facts->rank_count && !diagnosis->set_binding; r++) {
    const struct doctor_rank *mine = &facts->ranks[r];
    const struct doctor_host *host = &facts->hosts[mine->host];
    int cpus = doctor_count_cpus(mine->cpus), alike = 0;
    for (int k = 0; k < facts->rank_count; k++)
      alike += facts->ranks[k].host == mine->host &&
               memcmp(facts->ranks[k].cpus, mine->cpus, sizeof mine->cpus) == 0;
    if (alike <= cpus || cpus >= host->cpus_online || cpus == 0)
      continue;
    add(diagnosis, DOCTOR_SAME_CPU, mine->host,
        "%s: %d ranks, of which rank %d is one, are bound to the same %d of %d CPUs", host->name,
        alike, r, cpus, host->cpus_online);
    diagnosis->set_binding = true;
  }
}

/* --- Interfaces --------------------------------------------------------------------------------*/

/* The ratio by which another subnet must be faster: gigabit and 2.5 Gbit/s are further apart, the
 * runs of one and the same link are not. Subnets with less than USED_PART of the traffic are not
 * used. Plain TCP stays above LINK_PART of a link's speed; 25 Gbit/s are beyond what one process
 * can fill. MPI stays above a third of plain TCP. */
#define FASTER_RATIO 1.6
#define USED_PART    0.1
#define LINK_PART    0.6
#define MPI_RATIO    3.0
enum { MAX_LINK = 25000 };

static const char *name_in(const struct doctor_facts *facts, int subnet) {
  return doctor_interface_in(facts, 0, subnet)->name;
}

/* Counts the other hosts whose interfaces are up in the subnet of a host's, and those with its very
 * address. */
static int count_like(const struct doctor_facts *facts, int host, const struct doctor_interface *of,
                      bool address) {
  int count = 0;
  for (int h = 0; h < facts->host_count; h++)
    for (int i = 0; h != host && i < facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *one = &facts->hosts[h].interfaces[i];
      count += one->up && doctor_in_network(one, of->address, of->netmask) &&
               (!address || one->address == of->address);
    }
  return count;
}

/* Judges what the kernel says of interfaces, which no load can change. */
static void judge_links(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                        int used) {
  int speed = 0;
  for (int h = 0; used >= 0 && h < facts->host_count; h++) {
    const struct doctor_interface *one = doctor_interface_in(facts, h, used);
    speed = one->physical && one->speed > speed ? one->speed : speed;
  }
  for (int h = 0; h < facts->host_count; h++) {
    const char *host = facts->hosts[h].name;
    for (int i = 0; i < facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *one = &facts->hosts[h].interfaces[i];
      const int up = one->up ? 0 : count_like(facts, h, one, false);
      if (up)
        add(diagnosis, DOCTOR_DOWN, h, "%s: %s is down; on %d other host%s it is up", host,
            one->name, up, up == 1 ? "" : "s");
      if (one->up && one->half_duplex)
        add(diagnosis, DOCTOR_DUPLEX, h, "%s: %s has half duplex, at %d Mbit/s", host, one->name,
            one->speed);
    }
    const struct doctor_interface *one = used < 0 ? NULL : doctor_interface_in(facts, h, used);
    if (one && one->physical && one->speed > 0 && one->speed < speed)
      add(diagnosis, DOCTOR_NEGOTIATED, h,
          "%s: the link of %s runs at %d Mbit/s, those of others at %d", host, one->name,
          one->speed, speed);
  }
}

/* Judges what differs between hosts in the subnet that is used. */
static void judge_each_interface(const struct doctor_facts *facts,
                                 struct doctor_diagnosis *diagnosis, int used) {
  int common = 0, most = 0;
  for (int h = 0; h < facts->host_count; h++) {
    const int mtu = doctor_interface_in(facts, h, used)->mtu;
    int alike = 0;
    for (int other = 0; other < facts->host_count; other++)
      alike += doctor_interface_in(facts, other, used)->mtu == mtu;
    if (alike > most)
      most = alike, common = mtu;
  }
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *one = doctor_interface_in(facts, h, used);
    if (one->mtu != common)
      add(diagnosis, DOCTOR_MTU, h, "%s: MTU %d on %s, %d on %d of %d hosts", facts->hosts[h].name,
          one->mtu, one->name, common, most, facts->host_count);
    if (facts->bulk == 0 || doctor_part_of(facts, -1, used) <= 0 ||
        doctor_part_of(facts, h, used) >= USED_PART)
      continue;
    add(diagnosis, DOCTOR_ODD_INTERFACE, h,
        "%s: %.0f %% of what it sends takes %s, as most hosts' does", facts->hosts[h].name,
        100 * doctor_part_of(facts, h, used), one->name);
    diagnosis->set_subnet = diagnosis->set_subnet < 0 ? used : diagnosis->set_subnet;
  }
}

static bool is_faster(const struct doctor_facts *facts, int fast, int slow) {
  double rate = facts->subnets[slow].one_stream;
  return rate > 0 && facts->subnets[fast].one_stream >= FASTER_RATIO * rate;
}

/* True if a host sends in both: Open MPI cuts long messages among all that it may use. */
static bool sends_in_both(const struct doctor_facts *facts, int subnet, int other) {
  for (int h = 0; h < facts->host_count; h++)
    if (doctor_part_of(facts, h, subnet) >= USED_PART &&
        doctor_part_of(facts, h, other) >= USED_PART)
      return true;
  return false;
}

/* Judges a subnet that carries traffic, all of it or a part, where another one is faster. */
static void judge_subnets(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                          int used) {
  char networks[2][DOCTOR_ADDRESS];
  int best = 0;
  for (int s = 1; s < facts->subnet_count; s++)
    best = facts->subnets[s].one_stream > facts->subnets[best].one_stream ? s : best;
  const struct doctor_subnet *fast = &facts->subnets[best];
  for (int s = 0; s < facts->subnet_count && diagnosis->set_subnet < 0; s++) {
    const struct doctor_subnet *slow = &facts->subnets[s];
    if (!is_faster(facts, best, s) || (s != used && !sends_in_both(facts, s, best)))
      continue;
    add(diagnosis, DOCTOR_WRONG_INTERFACE, -1,
        "%.0f %% of MPI's traffic takes %s (%s), where plain TCP carries %.2f Gbit/s; %s (%s), "
        "which all hosts have too, carries %.2f",
        100 * doctor_part_of(facts, -1, s), name_in(facts, s),
        doctor_network(slow->network, slow->netmask, networks[0]), slow->one_stream,
        name_in(facts, best), doctor_network(fast->network, fast->netmask, networks[1]),
        fast->one_stream);
    diagnosis->set_subnet = best;
  }
}

/* Judges what plain TCP carries in the subnet that is used: against MPI of the same pair, the
 * links, and more streams. */
static void judge_tcp(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                      int used) {
  const struct doctor_subnet *subnet = &facts->subnets[used];
  const double best = fmax(subnet->one_stream, subnet->four_streams);
  int speed = MAX_LINK;
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *one = doctor_interface_in(facts, h, used);
    const double tcp = facts->hosts[h].tcp[used],
                 mpi = facts->bandwidth[(h ^ 1) * facts->host_count + h];
    speed = !one->physical || one->speed <= 0 ? 0 : one->speed < speed ? one->speed : speed;
    if (tcp > 0 && mpi > 0 && tcp < MAX_LINK * 1e-3 && tcp >= MPI_RATIO * mpi)
      add(diagnosis, DOCTOR_MPI_SLOW, -1,
          "%s to %s: MPI carries %.2f Gbit/s, plain TCP %.2f between the same two by %s",
          facts->hosts[h ^ 1].name, facts->hosts[h].name, mpi, tcp, one->name);
  }
  if (best <= 0)
    add(diagnosis, DOCTOR_FIREWALL, -1, "MPI works, but no plain TCP connection is made by %s",
        name_in(facts, used));
  else if (speed < MAX_LINK && best < LINK_PART * speed * 1e-3)
    add(diagnosis, DOCTOR_LINK_SPEED, -1,
        "plain TCP carries %.2f Gbit/s at best, but the slowest link has %.1f", best, speed * 1e-3);
  if (subnet->one_stream > 0 && subnet->four_streams >= FASTER_RATIO * subnet->one_stream) {
    add(diagnosis, DOCTOR_STREAMS_HELP, -1, "plain TCP: %.2f Gbit/s in one stream, %.2f in four",
        subnet->one_stream, subnet->four_streams);
    diagnosis->set_streams = true;
  }
}

/* --- Hosts and pairs ---------------------------------------------------------------------------*/

#define HOST_RATIO        1.6
#define PAIR_RATIO        2.0 /* pairs are many, and one of many is more often late by chance */
#define LATE_RATIO        3.0
#define LATE_MICROSECONDS 100.0 /* less is a longer cable or another switch: it costs nothing */

/* Finds each host's best values with any other: noise and a partner's faults only lower rates and
 * raise times. */
static void judge_find_best(const struct doctor_facts *facts, double *sends, double *receives,
                            double *times) {
  const int hosts = facts->host_count;
  for (int from = 0; from < hosts; from++)
    for (int to = 0; to < hosts; to++) {
      const double rate = facts->bandwidth[from * hosts + to];
      const double time = facts->round_trip[from * hosts + to];
      sends[from] = fmax(sends[from], rate);
      receives[to] = fmax(receives[to], rate);
      if (time > 0 && (times[from] <= 0 || time < times[from]))
        times[from] = time;
    }
}

static double judge_largest(const double *values, int count) {
  double most = 0;
  for (int i = 0; i < count; i++)
    most = fmax(most, values[i]);
  return most;
}

static void judge_host(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                       int host, const double *sends, const double *receives, const double *times) {
  const int hosts = facts->host_count;
  const bool out = doctor_outlier(sends[host], sends, hosts, HOST_RATIO, true);
  const bool in = doctor_outlier(receives[host], receives, hosts, HOST_RATIO, true);
  const double *way = out ? sends : receives;
  double best = INFINITY;
  for (int h = 0; h < hosts; h++)
    best = times[h] > 0 ? fmin(best, times[h]) : best;
  if (out || in)
    add(diagnosis, DOCTOR_SLOW_HOST, host, "%s: %.2f Gbit/s %s every other host, the others %.2f",
        facts->hosts[host].name, way[host],
        !in   ? "to"
        : out ? "to and from"
              : "from",
        judge_largest(way, hosts));
  if (doctor_outlier(times[host], times, hosts, LATE_RATIO, false) &&
      times[host] >= best + LATE_MICROSECONDS)
    add(diagnosis, DOCTOR_LATE_HOST, host,
        "%s: a round trip takes %.0f us to any other host, %.0f us among others",
        facts->hosts[host].name, times[host], best);
}

/* Judges hosts and pairs. The expected rate is that of each with others; of two hosts only the
 * directions differ. */
static void judge_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const int hosts = facts->host_count;
  double *sends = calloc(3 * (size_t)hosts, sizeof *sends);
  if (!sends)
    return;
  double *receives = sends + hosts, *times = receives + hosts;
  judge_find_best(facts, sends, receives, times);
  for (int h = 0; h < hosts; h++)
    judge_host(facts, diagnosis, h, sends, receives, times);
  for (int pair = 0; pair < hosts * hosts; pair++) {
    const int from = pair / hosts, to = pair % hosts;
    const double expected = hosts == 2 ? judge_largest(sends, 2) : fmin(sends[from], receives[to]);
    if (facts->bandwidth[pair] > 0 && facts->bandwidth[pair] * PAIR_RATIO <= expected)
      add(diagnosis, DOCTOR_SLOW_PAIR, from, "%s to %s: %.2f Gbit/s, but %.2f Gbit/s %s",
          facts->hosts[from].name, facts->hosts[to].name, facts->bandwidth[pair], expected,
          hosts == 2 ? "the other way" : "with other hosts");
  }
  free(sends);
}

/* --- What MPI does not mind, but others do -----------------------------------------------------*/

#define CLOCK_SECONDS 1.0

/* Counts the hosts whose clocks differ from a host's, *by the last of them. */
static int count_apart(const struct doctor_facts *facts, int host, double *by) {
  int count = 0;
  for (int h = 0; h < facts->host_count; h++) {
    const double apart = facts->hosts[host].clock - facts->hosts[h].clock;
    if (fabs(apart) >= CLOCK_SECONDS)
      count++, *by = apart;
  }
  return count;
}

static void judge_surroundings(const struct doctor_facts *facts,
                               struct doctor_diagnosis *diagnosis) {
  for (int h = 0, bridge = 0; h < facts->host_count; h++) {
    const struct doctor_host *host = &facts->hosts[h];
    for (int i = 0; i < host->interface_count && !bridge; i++) {
      const struct doctor_interface *one = &host->interfaces[i];
      const int like = one->up && !one->physical ? count_like(facts, h, one, true) : 0;
      bridge = like;
      if (like)
        add(diagnosis, DOCTOR_BRIDGE, -1, "%s: %s has an address that %d other host%s too",
            host->name, one->name, like, like == 1 ? " has" : "s have");
    }
    if (host->loopback[0] && facts->host_count > 1)
      add(diagnosis, DOCTOR_LOOPBACK_NAME, h, "%s: /etc/hosts gives its own name the address %s",
          host->name, host->loopback);
    double by = 0;
    const int apart = 2 * count_apart(facts, h, &by); /* of two halves host 0's is right */
    if (apart > facts->host_count ||
        (apart == facts->host_count && fabs(host->clock) >= CLOCK_SECONDS))
      add(diagnosis, DOCTOR_CLOCK, h, "%s: its clock differs from the others' by %.1f s",
          host->name, by);
  }
}

/* Causes come before what follows from them: processors, the kernel's word on interfaces, hosts,
 * networks. */
void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const int used = doctor_used_subnet(facts);
  *diagnosis = (struct doctor_diagnosis){.set_subnet = -1};
  bool vague = judge_load(facts, diagnosis);
  vague = vague || judge_waiting(facts, diagnosis);
  judge_binding(facts, diagnosis);
  if (facts->host_count >= 2) {
    judge_links(facts, diagnosis, used);
    if (!vague)
      judge_hosts(facts, diagnosis);
    if (!vague && used >= 0)
      judge_subnets(facts, diagnosis, used);
    if (used >= 0)
      judge_each_interface(facts, diagnosis, used);
    if (!vague && used >= 0)
      judge_tcp(facts, diagnosis, used);
  }
  judge_surroundings(facts, diagnosis);
}
