//! Asks for `alice` five times. The rule file is the first argument.

use tidegate::embedded::RateLimiter;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rules = std::env::args().nth(1).unwrap_or_else(|| "rules.yaml".to_owned());
    let limiter = RateLimiter::from_files([rules])?;
    for _ in 0..5 {
        let answer = limiter.decide("edge", [[("user", "alice")]])?;
        let remaining = answer.limits[0].remaining;
        match answer.retry_after {
            None => println!("admitted, {remaining} left"),
            Some(after) => println!("refused, again after {} s", after.as_secs() + 1),
        }
    }
    Ok(())
}
