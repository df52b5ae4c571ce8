// A served page loads itself anew when its run has gone on; what was chosen in forms is left to the next look.
function keepUp({ state, seconds: pause }) {
  const busy = () => document.activeElement && document.activeElement.matches("input, select");
  setInterval(async () => {
    const answer = await fetch("state").catch(() => null), now = answer && answer.ok ? await answer.text() : state;
    if (now !== state && !busy() && !document.hidden) location.reload();
  }, pause * 1000);
}

keepUp(JSON.parse(byId("data").textContent).live);
