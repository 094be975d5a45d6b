/* Tests the findings of onebit-tune --doctor for given measurements, without MPI, a network or a
 * clock. */
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support.h"
#include "tools/doctor/doctor.h"
#include "tools/tune/tune.h"

/* --- A cluster to be diagnosed
 * ----------------------------------------------------------------- */

enum { HOSTS = 4, MIB = 1 << 20 };
#define ETH0(host) (0x0a4d0001u + (uint32_t)(host)) /* 10.77.0.1 and following */
#define ETH1(host) (0x0a580001u + (uint32_t)(host)) /* 10.88.0.1 and following */
#define MASK       0xffffff00u

/* Returns a factor that differs by a few per cent from 1 and is the same in every run. */
static double small_deviation(int a, int b) { return 1 + 0.05 * ((a * 7 + b * 3) % 5 - 2); }

static struct doctor_facts make_cluster(int hosts) {
  static struct doctor_host all[HOSTS];
  static double bandwidth[HOSTS * HOSTS];
  struct doctor_facts facts = {.library = "Open MPI v4.1.4",
                               .yields = 1,
                               .rank_count = hosts,
                               .host_count = hosts,
                               .hosts = all,
                               .bulk = 4 * MIB,
                               .bandwidth = bandwidth};
  for (int h = 0; h < hosts; h++) {
    all[h] = (struct doctor_host){.ranks = 1, .cpus_online = 2, .usable = 2, .interface_count = 2};
    snprintf(all[h].name, sizeof all[h].name, "h%d", h + 1);
    all[h].interfaces[0] = (struct doctor_interface){"eth0", ETH0(h), MASK,  1500,          10000,
                                                     true,   false,   false, 4 * MIB + 5000};
    all[h].interfaces[1] =
        (struct doctor_interface){"eth1", ETH1(h), MASK, 1500, 10000, true, false, false, 200};
    for (int other = 0; other < hosts; other++) {
      bandwidth[h * hosts + other] = h == other ? 0 : 0.9 * small_deviation(h, other);
    }
  }
  doctor_find_subnets(&facts);
  for (int s = 0; s < facts.subnet_count; s++)
    facts.subnets[s].tcp = 0.94;
  for (int h = 1; h < hosts; h += 2)
    all[h].tcp[0] = all[h].tcp[1] = 0.94;
  return facts;
}

/* Returns the findings as the program prints them. */
static const char *print_findings(const struct doctor_facts *facts,
                                  const struct doctor_diagnosis *diagnosis) {
  static char text[4096];
  memset(text, 0, sizeof text);
  FILE *file = fmemopen(text, sizeof text - 1, "w");
  doctor_print_findings(file, facts, diagnosis);
  fclose(file);
  return text;
}

/* Returns the finding of a diagnosis that must have exactly one. */
static const struct doctor_finding *only_finding(const struct doctor_facts *facts,
                                                 struct doctor_diagnosis *diagnosis) {
  doctor_judge(facts, diagnosis);
  cr_assert_eq(diagnosis->count, 1, "%d findings, the first: %s", diagnosis->count,
               diagnosis->findings[0].seen);
  return &diagnosis->findings[0];
}

static struct doctor_diagnosis diagnosis;

/* --- Parts that only compute
 * ------------------------------------------------------------------- */

Test(doctor, low_rates_are_far_and_beyond_noise) {
  const double slow[] = {0.94, 0.93, 0.19, 0.95}, noisy[] = {0.94, 0.6, 0.9, 0.3, 0.5, 0.99};
  const double half[] = {0.94, 0.19, 0.93, 0.18};
  cr_expect(doctor_is_outlier(0.19, slow, 4, 1.6));
  cr_expect(!doctor_is_outlier(0.93, slow, 4, 1.6));
  cr_expect(!doctor_is_outlier(0.5, noisy, 6, 1.6), "within the spread of the others");
  cr_expect(doctor_is_outlier(0.18, half, 4, 1.6), "half of them are slow");
  cr_expect(!doctor_is_outlier(0.19, slow + 1, 2, 1.6), "of two none is an outlier");
  cr_expect(!doctor_is_outlier(0, slow, 4, 1.6), "not measured");
}

Test(doctor, medians) {
  double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2};
  cr_expect_eq(tune_median(odd, 3), 2);
  cr_expect_eq(tune_median(even, 4), 2.5);
  cr_expect_eq(tune_median(even, 0), 0);
}

Test(doctor, subnets_are_those_that_join_all_hosts) {
  struct doctor_facts facts = make_cluster(3);
  char text[DOCTOR_ADDRESS];
  cr_assert_eq(facts.subnet_count, 2);
  cr_expect_eq(facts.subnets[1].network, ETH1(0) & MASK);
  cr_expect_str_eq(doctor_format_network(ETH1(2), MASK, text), "10.88.0.3/24");
  facts.hosts[2].interfaces[1].up = false;
  doctor_find_subnets(&facts);
  cr_expect_eq(facts.subnet_count, 1, "an interface that is down joins nothing");
  for (int h = 0; h < 3; h++)
    facts.hosts[h].interfaces[0].address = 0xac110001; /* docker0: 172.17.0.1 on all hosts */
  doctor_find_subnets(&facts);
  cr_expect_eq(facts.subnet_count, 0);
}

Test(doctor, counters_become_differences) {
  struct doctor_host before = make_cluster(1).hosts[0], after = before;
  after.interfaces[0].sent += 7;
  strcpy(after.interfaces[1].name, "new0");
  doctor_subtract(&before, &after);
  cr_expect_eq(after.interfaces[0].sent, 7);
  cr_expect_eq(after.interfaces[1].sent, 0, "it was not there before");
}

/* --- Findings ----------------------------------------------------------------------------------*/

Test(doctor, a_healthy_cluster_has_none) {
  for (int hosts = 1; hosts <= HOSTS; hosts++) {
    struct doctor_facts facts = make_cluster(hosts);
    doctor_judge(&facts, &diagnosis);
    cr_expect_eq(diagnosis.count, 0, "%d hosts: %s", hosts, diagnosis.findings[0].seen);
    cr_expect_str_eq(print_findings(&facts, &diagnosis), "\nNo findings.\n");
  }
}

Test(doctor, noise_is_not_a_finding) {
  struct doctor_facts facts = make_cluster(HOSTS);
  facts.bandwidth[1] = facts.bandwidth[6] = 0.6;
  facts.subnets[0].tcp = 0.7;
  facts.hosts[1].others = 0.4;
  facts.hosts[2].stolen = 0.02;
  facts.hosts[3].clock = 0.3;
  doctor_judge(&facts, &diagnosis);
  cr_expect_eq(diagnosis.count, 0, "%s", diagnosis.findings[0].seen);
}

Test(doctor, of_two_hosts_the_slower_way_is_named) {
  struct doctor_facts facts = make_cluster(2);
  facts.bandwidth[2] = 0.2;
  const struct doctor_finding *finding = only_finding(&facts, &diagnosis);
  cr_expect(strstr(finding->seen, "h2 to h1: the link carries 0.20 Gbit/s, but 0.9"), "%s",
            finding->seen);
}

Test(doctor, traffic_over_a_slow_and_a_fast_interface_is_found) {
  struct doctor_facts facts = make_cluster(HOSTS);
  for (int h = 0; h < HOSTS; h++)
    facts.hosts[h].interfaces[0].sent = facts.hosts[h].interfaces[1].sent = 2 * MIB;
  doctor_judge(&facts, &diagnosis);
  cr_expect_eq(diagnosis.count, 0, "two that are equally fast: %s", diagnosis.findings[0].seen);
  facts.hosts[1].interfaces[1].sent += 1000; /* no host differs because of this traffic */
  facts.subnets[1].tcp = 0.1;
  cr_expect_eq(only_finding(&facts, &diagnosis)->kind, DOCTOR_WRONG_INTERFACE);
  cr_expect(strstr(diagnosis.findings[0].seen, "50 % of MPI's traffic takes eth1"));
  cr_expect(strstr(print_findings(&facts, &diagnosis), "btl_tcp_if_include 10.77.0.0/24 "));
}

Test(doctor, traffic_that_the_kernel_does_not_count_is_not_judged) {
  struct doctor_facts facts = make_cluster(HOSTS);
  for (int h = 0; h < HOSTS; h++)
    facts.hosts[h].interfaces[0].sent = 2000;
  facts.subnets[0].tcp = 0.1;
  cr_expect_eq(doctor_traffic_part(&facts, 0, 0), 0);
  cr_expect_eq(doctor_used_subnet(&facts), -1);
  doctor_judge(&facts, &diagnosis);
  cr_expect_eq(diagnosis.count, 0, "%s", diagnosis.findings[0].seen);
}

Test(doctor, ranks_that_starve_each_other_are_found) {
  struct doctor_facts facts = make_cluster(2);
  facts.yields = 0;
  facts.hosts[1].local_hop = 5000;
  facts.bandwidth[1] = 0.01; /* bandwidth between ranks that starve each other is ignored */
  const struct doctor_finding *finding = only_finding(&facts, &diagnosis);
  cr_expect_eq(finding->kind, DOCTOR_SPINNING);
  cr_expect(strstr(finding->seen, "5000 us per hop") && strstr(finding->seen, "idle is off"), "%s",
            finding->seen);
  cr_expect(strstr(print_findings(&facts, &diagnosis), "mpirun --mca mpi_yield_when_idle 1"));
  facts.hosts[1].local_hop = 400;
  doctor_judge(&facts, &diagnosis);
  cr_expect_eq(diagnosis.findings[0].kind, DOCTOR_SLOW_PAIR, "2 processors for 1 rank");
  facts.hosts[1].ranks = 3;
  cr_expect_eq(only_finding(&facts, &diagnosis)->kind, DOCTOR_SPINNING, "3 ranks on them");
  facts.yields = 1;
  facts.hosts[1].local_hop = 5000;
  cr_expect(!strstr(only_finding(&facts, &diagnosis)->seen, "is off"), "it is on already");
  facts.yields = 0;
  facts.hosts[1].others = 1.8;
  doctor_judge(&facts, &diagnosis);
  cr_expect(diagnosis.count == 2 && diagnosis.findings[1].kind == DOCTOR_SPINNING,
            "busy processors do not hide it: %s", diagnosis.findings[0].seen);
}

/* --- Misconfigured clusters: the culprit is named first, and no host is named if none is at
 * fault. */

static void make_host_slow(struct doctor_facts *facts) {
  for (int other = 0; other < HOSTS; other++)
    if (other != 2)
      facts->bandwidth[2 * HOSTS + other] = facts->bandwidth[other * HOSTS + 2] = 0.19;
  facts->hosts[3].tcp[0] = 0.19; /* from h3 */
}

static void make_pair_slow(struct doctor_facts *facts) { facts->bandwidth[1 * HOSTS + 3] = 0.2; }

static void make_links_physical(struct doctor_facts *facts) {
  for (int h = 0; h < HOSTS; h++)
    facts->hosts[h].interfaces[0].physical = true;
}

static void make_sending_slow(struct doctor_facts *facts) {
  for (int other = 0; other < HOSTS - 1; other++)
    facts->bandwidth[3 * HOSTS + other] = 0.3;
}

/* One host's link runs at 100 Mbit/s, so everything that the host sends and receives is slow. */
static void negotiate_slow_link(struct doctor_facts *facts) {
  for (int h = 0; h < HOSTS; h++) {
    facts->hosts[h].interfaces[0].physical = true;
    facts->hosts[h].interfaces[0].speed = h == 2 ? 100 : 1000;
    if (h != 2)
      facts->bandwidth[2 * HOSTS + h] = facts->bandwidth[h * HOSTS + 2] = 0.09;
  }
  facts->hosts[3].tcp[0] = 0.09; /* from h3 */
}

static void make_link_half_duplex(struct doctor_facts *facts) {
  facts->hosts[1].interfaces[0].half_duplex = true;
  for (int other = 0; other < HOSTS; other++)
    facts->bandwidth[other * HOSTS + 1] *= 0.2;
  facts->hosts[1].tcp[0] *= 0.2;
}

/* The cable of the fast network is unplugged at one host, so all traffic uses the slow network. */
static void take_link_down(struct doctor_facts *facts) {
  facts->hosts[3].interfaces[1].up = false;
  doctor_find_subnets(facts);
}

static void make_mpi_slow(struct doctor_facts *facts) {
  for (int pair = 0; pair < HOSTS * HOSTS; pair++)
    facts->bandwidth[pair] *= 0.1;
}

static void add_firewall(struct doctor_facts *facts) {
  for (int s = 0; s < facts->subnet_count; s++)
    facts->subnets[s].tcp = 0;
  for (int h = 0; h < HOSTS; h++)
    facts->hosts[h].tcp[0] = facts->hosts[h].tcp[1] = 0;
}

static void set_odd_mtu(struct doctor_facts *facts) { facts->hosts[3].interfaces[0].mtu = 9000; }

static void add_bridges(struct doctor_facts *facts) {
  for (int h = 0; h < HOSTS; h++)
    facts->hosts[h].interfaces[facts->hosts[h].interface_count++] = (struct doctor_interface){
        .name = "docker0", .address = 0xac110001, .netmask = 0xffff0000, .mtu = 1500, .up = true};
}

static void set_loopback_name(struct doctor_facts *facts) {
  strcpy(facts->hosts[2].loopback, "127.0.1.1");
}

static void set_clocks_apart(struct doctor_facts *facts) {
  for (int h = 1; h < HOSTS; h++)
    facts->hosts[h].clock = -90 + 0.01 * h;
}

static void use_odd_interface(struct doctor_facts *facts) {
  facts->hosts[2].interfaces[0].sent = 300;
  facts->hosts[2].interfaces[1].sent = 4 * MIB;
  facts->subnets[1].tcp = 0.3;
}

static void bind_to_one_core(struct doctor_facts *facts) {
  facts->hosts[1].ranks = 2;
  facts->hosts[1].usable = 1;
}

static void use_slow_interface(struct doctor_facts *facts) {
  facts->subnets[0].tcp = 0.1;
  for (int h = 0; h < HOSTS; h++)
    facts->hosts[h].tcp[0] *= 0.1;
}

static void make_ranks_spin(struct doctor_facts *facts) {
  facts->hosts[1].local_hop = 5000;
  make_sending_slow(facts); /* slow sending between spinning ranks must give no finding */
}

static void steal_processor_time(struct doctor_facts *facts) {
  facts->hosts[1].stolen = 0.2;
  make_sending_slow(facts);
}

static void throttle_host(struct doctor_facts *facts) {
  facts->hosts[2].lost_periods = 40;
  make_sending_slow(facts);
}

/* Other programs run on one host. Measurements of this host are bad, but they alone must not make
 * the doctor name a host. */
static void make_host_busy(struct doctor_facts *facts) {
  facts->hosts[0].others = 1.8;
  make_sending_slow(facts);
}

/* All hosts are emulated on one busy machine. */
static void make_all_hosts_busy(struct doctor_facts *facts) {
  for (int h = 0; h < HOSTS; h++)
    facts->hosts[h].others = 1.9;
  make_sending_slow(facts);
  make_mpi_slow(facts);
}

/* A link that is ten times too slow is found although all hosts are busy. */
static void make_busy_and_slow(struct doctor_facts *facts) {
  make_all_hosts_busy(facts);
  for (int other = 0; other < HOSTS; other++)
    facts->bandwidth[2 * HOSTS + other] *= 0.1, facts->bandwidth[other * HOSTS + 2] *= 0.1;
}

Test(doctor, the_culprit_is_named_first) {
  static const struct {
    void (*break_it)(struct doctor_facts *facts);
    enum doctor_kind kind;
    int host, count;
    const char *seen, *printed; /* texts in the first finding and in the report; NULL: any */
  } rows[] = {
      {make_host_slow, DOCTOR_SLOW_HOST, 2, 1,
       "h3: it carries 0.19 Gbit/s to and from every other host, but the other hosts carry 0.9",
       NULL},
      {make_pair_slow, DOCTOR_SLOW_PAIR, 1, 1, "h2 to h4: the link carries 0.20 Gbit/s", NULL},
      {make_links_physical, DOCTOR_LINK_SPEED, -1, 1,
       "TCP carries 0.94 Gbit/s at best, but the slowest link has 10", NULL},
      {make_sending_slow, DOCTOR_SLOW_HOST, 3, 1, "h4: it carries 0.30 Gbit/s to every other host",
       NULL},
      {negotiate_slow_link, DOCTOR_NEGOTIATED, 2, 2, "h3: the link of eth0 runs at 100 Mbit/s",
       NULL},
      {make_link_half_duplex, DOCTOR_DUPLEX, 1, 2, "h2: eth0 runs in half duplex", NULL},
      {take_link_down, DOCTOR_DOWN, 3, 2, "h4: eth1 is down, but it is up on 3 other hosts", NULL},
      {use_slow_interface, DOCTOR_WRONG_INTERFACE, -1, 1,
       "100 % of MPI's traffic takes eth0 (10.77.0.0/24), where plain TCP carries 0.10 Gbit/s; "
       "eth1 (10.88.0.0/24), which all hosts also have, carries 0.94",
       "mpirun --mca btl_tcp_if_include 10.88.0.0/24 --mca oob_tcp_if_include 10.88.0.0/24\n"
       "         else, where eth1 is its name: HYDRA_IFACE=eth1 FI_TCP_IFACE=eth1 (MPICH),\n"
       "         UCX_NET_DEVICES=eth1 UCX_TLS=tcp,self,sm, NCCL_SOCKET_IFNAME==eth1 "
       "NCCL_IB_DISABLE=1\n"},
      {use_odd_interface, DOCTOR_ODD_INTERFACE, 2, 1, "h3: only 0 % of what it sends takes eth0",
       "btl_tcp_if_include 10.77.0.0/24 "},
      {bind_to_one_core, DOCTOR_SAME_CPU, 1, 1, "h2: 2 ranks are bound to the same 1 of 2 CPUs",
       "mpirun --bind-to none"},
      {make_mpi_slow, DOCTOR_MPI_SLOW, -1, 2,
       "h1 to h2: MPI carries 0.09 Gbit/s, but plain TCP carries 0.94", NULL},
      {add_firewall, DOCTOR_FIREWALL, -1, 1, "no plain TCP connection is made by eth0", NULL},
      {set_odd_mtu, DOCTOR_MTU, 3, 1, "h4: the MTU is 9000 on eth0, but 1500 on 3 of 4 hosts",
       NULL},
      {add_bridges, DOCTOR_BRIDGE, -1, 1, "docker0 has an address that 3 other hosts have as well",
       NULL},
      {set_loopback_name, DOCTOR_LOOPBACK_NAME, 2, 1,
       "h3: /etc/hosts gives its own name the address 127", NULL},
      {set_clocks_apart, DOCTOR_CLOCK, 0, 1, "h1: its clock differs from the others' by 90.0 s",
       NULL},
      {make_ranks_spin, DOCTOR_SPINNING, 1, 1, "5000 us per hop", NULL},
      {steal_processor_time, DOCTOR_STOLEN, 1, 1, "h2: the hypervisor took 20 %", NULL},
      {throttle_host, DOCTOR_STOLEN, 2, 1, "h3: the hypervisor took 0 %", NULL},
      {make_host_busy, DOCTOR_BUSY, 0, 1, "h1: other programs use 1.8 of the 2 CPUs", NULL},
      {make_all_hosts_busy, DOCTOR_BUSY, -1, 1, "and other hosts are as busy", NULL},
      {make_busy_and_slow, DOCTOR_BUSY, -1, 2, "and other hosts are as busy", NULL}};
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    struct doctor_facts facts = make_cluster(HOSTS);
    rows[k].break_it(&facts);
    doctor_judge(&facts, &diagnosis);
    const struct doctor_finding *first = &diagnosis.findings[0];
    const char *text = print_findings(&facts, &diagnosis);
    cr_expect(strstr(text, rows[k].printed ? rows[k].printed : " 1. ") && strstr(text, "why: ") &&
                  strstr(text, "do:  ") && !strstr(text, "(null)"),
              "row %zu: %s", k, text);
    cr_expect(diagnosis.count > 0 && first->kind == rows[k].kind && first->host == rows[k].host &&
                  strstr(first->seen, rows[k].seen),
              "row %zu: %d findings, the first: %s", k, diagnosis.count, first->seen);
    for (int i = 0; i < diagnosis.count; i++)
      cr_expect(diagnosis.findings[i].host == rows[k].host || diagnosis.findings[i].host < 0 ||
                    rows[k].host < 0,
                "row %zu names another host: %s", k, diagnosis.findings[i].seen);
    cr_expect_eq(diagnosis.count, rows[k].count, "row %zu: %d findings, the second: %s", k,
                 diagnosis.count, diagnosis.findings[1].seen);
  }
  cr_expect_eq(diagnosis.findings[1].host, 2, "%s", diagnosis.findings[1].seen);
}

Test(doctor, a_name_of_the_loopback_is_found_in_hosts) {
  static const struct {
    const char *text, *address;
  } rows[] = {{"127.0.0.1 localhost\n127.0.1.1\th3.cluster h3\n", "127.0.1.1"},
              {"127.0.0.1 localhost h3x\n10.0.0.3 h3 # 127.0.1.1\n", ""},
              {"# 127.0.1.1 h3\n127.0.0.1 # h3\n", ""},
              {"\n  127.0.0.1 h3", "127.0.0.1"}};
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    char text[100], found[16];
    strcpy(text, rows[k].text);
    FILE *file = fmemopen(text, strlen(text), "r");
    doctor_find_loopback(file, "h3", found);
    fclose(file);
    cr_expect_str_eq(found, rows[k].address, "row %zu", k);
  }
}

Test(doctor, loads_are_read_from_the_kernel) {
  struct doctor_load load;
  doctor_read_load(&load);
  cr_expect(load.busy > 0 && load.seconds > 0 && load.stolen >= 0 && load.lost_periods >= 0);
}

/* The receiver's rate is computed from the bytes received. If no rank listens, no rank may wait. */
Test(doctor, plain_tcp_is_measured) {
  const uint32_t here = 0x7f000001;
  uint16_t port;
  int listener = doctor_listen(here, &port);
  cr_assert(listener >= 0 && port > 0);
  pid_t sender = fork();
  if (sender == 0) {
    doctor_send(here, here, port);
    _exit(0);
  }
  cr_expect_gt(doctor_receive(listener), 0);
  cr_expect_eq(waitpid(sender, NULL, 0), sender);
  doctor_send(here, here, port);
  cr_expect_eq(doctor_listen(0x08080808, &port), -1, "it is no address of this host");
}

Test(doctor, findings_beyond_room_are_counted) {
  struct doctor_facts facts = make_cluster(HOSTS);
  struct doctor_host hosts[30];
  double bandwidth[900] = {0};
  for (int h = 0; h < 30; h++) {
    hosts[h] = facts.hosts[0];
    hosts[h].interfaces[0].address = ETH0(h);
    hosts[h].interfaces[1].address = ETH1(h);
    hosts[h].interfaces[0].mtu = h < 2 ? 1500 : 1500 + h;
  }
  facts.hosts = hosts;
  facts.rank_count = 1;
  facts.host_count = 30;
  facts.bandwidth = bandwidth;
  doctor_find_subnets(&facts);
  facts.subnets[0].tcp = 0.94;
  doctor_judge(&facts, &diagnosis);
  cr_expect_eq(diagnosis.count, DOCTOR_MAX_FINDINGS);
  cr_expect_eq(diagnosis.more, 28 - DOCTOR_MAX_FINDINGS);
}

Test(doctor, one_host_says_what_cannot_be_measured) {
  static char text[8192];
  struct doctor_facts facts = make_cluster(1);
  FILE *file = fmemopen(text, sizeof text - 1, "w");
  doctor_judge(&facts, &diagnosis);
  doctor_print_facts(file, &facts);
  doctor_print_findings(file, &facts, &diagnosis);
  fclose(file);
  cr_expect_eq(diagnosis.count, 0);
  cr_expect(strstr(text, "All ranks are on one host") && strstr(text, "cannot be measured"), "%s",
            text);
  cr_expect(strstr(text, "1 rank on 1 host; Open MPI v4.1.4"), "%s", text);
  cr_expect(strstr(text, "eth1") && strstr(text, "10.88.0.1") && strstr(text, "No findings."));
}
