// Faults on purpose, where the cluster allows them (kv_transfer.allow_faults): what goes wrong, how often, and whose.

import { byId, make } from "./dom.js";

const FAULTS = {
  read_fails: "a read of KV fails",
  read_hangs: "a read of KV never ends",
  read_late: "a read of KV is late",
  bit_flips: "KV arrives damaged",
  handshake_refused: "a worker refuses another",
  notification_lost: "a message is lost",
  notification_late: "a message is late",
  notification_twice: "a message comes twice",
  lease_expired: "a lease runs out",
  peer_replaced: "a peer was restarted",
};

// `give(order)` asks whether an order is meant, and gives it.
export function startFaults(give) {
  byId("fault").replaceChildren(
    ...Object.entries(FAULTS).map(([name, text]) => make("option", { value: name, text })),
  );
  byId("faults-form").addEventListener("submit", (event) => {
    event.preventDefault();
    begin(give);
  });
  byId("faults-end").addEventListener("click", () => {
    give({
      title: "End all faults?",
      text: "Workers get no more injected faults, not even those of the configuration.",
      body: {},
      done: "no more injected faults",
    });
  });
}

function begin(give) {
  const fault = byId("fault").value;
  const share = Number(byId("fault-share").value);
  const role = byId("fault-role").value;
  const whose = role ? `${role} workers` : "all workers";
  const body = { faults: { [fault]: share } };
  if (role) body.role = role;
  give({
    title: "Inject faults?",
    text: `On ${whose}: ${FAULTS[fault]}, with a probability of ${+(100 * share).toFixed(2)} %, and no other fault.`,
    body,
    done: `injected on ${whose}: ${FAULTS[fault]}`,
  });
}

export function showFaults(state) {
  byId("faults").hidden = !(state.allows_faults && state.takes_orders);
  const known = [...byId("fault-role").options].map((option) => option.value);
  for (const role of state.pools) {
    if (!known.includes(role)) byId("fault-role").append(make("option", { value: role, text: `${role} workers` }));
  }
}
